variable "bucket" {
  description = "Name of the bucket to create. Without dots, which no TLS certificate of S3 covers."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket)) && !startswith(var.bucket, "xn--")
    error_message = "A bucket's name has 3 to 63 characters: lower-case letters, digits and hyphens, with a letter or digit at both ends."
  }

  validation {
    condition     = !endswith(var.bucket, "--x-s3") && !endswith(var.bucket, "-s3alias")
    error_message = "This suffix is S3's own (directory buckets, access points): choose another name."
  }
}

variable "prefix" {
  description = "Folder of the bucket that the runs lie in, as PREFIX/RUN. The roles reach nothing outside it. Empty: the whole bucket."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?$", var.prefix))
    error_message = "The prefix is made of letters, digits and . _ - with single slashes between, none at its ends, and no part begins with a dot."
  }
}

variable "checkpoint" {
  description = "What the output objckpt_toml says of a run: its name, and interval, keep and cache as in objckpt.toml (left out: objckpt's own defaults)."
  type = object({
    run      = optional(string, "main")
    cache    = optional(string)
    interval = optional(number)
    keep     = optional(number)
  })
  default  = {}
  nullable = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$", var.checkpoint.run))
    error_message = "checkpoint.run is made of letters, digits and . _ - with single slashes between, none at its ends, and no part begins with a dot."
  }

  validation {
    condition     = try(startswith(var.checkpoint.cache, "/"), var.checkpoint.cache == null)
    error_message = "checkpoint.cache is the absolute path of a directory on the node."
  }

  validation {
    condition     = try(var.checkpoint.interval >= 1 && floor(var.checkpoint.interval) == var.checkpoint.interval, var.checkpoint.interval == null)
    error_message = "checkpoint.interval is a whole number of steps, 1 at least."
  }

  validation {
    condition     = try(var.checkpoint.keep >= 2 && floor(var.checkpoint.keep) == var.checkpoint.keep, var.checkpoint.keep == null)
    error_message = "checkpoint.keep is a whole number, 2 at least: with one checkpoint there is none to fall back to if it is damaged."
  }
}

variable "name" {
  description = "What the names of roles and instance profiles begin with. Left out: the bucket's name."
  type        = string
  default     = null

  validation {
    condition     = can(regex("^[A-Za-z0-9+=,.@_-]{1,56}$", var.name)) || var.name == null
    error_message = "A name has 1 to 56 characters: letters, digits and + = , . @ _ -."
  }
}

variable "kms_key_arn" {
  description = "ARN of the KMS key that encrypts the bucket. Left out: a key is created. The policy of a given key must let IAM policies of this account use it."
  type        = string
  default     = null

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", var.kms_key_arn)) || var.kms_key_arn == null
    error_message = "kms_key_arn is the ARN of a key (arn:aws:kms:REGION:ACCOUNT:key/ID). An alias does not do: IAM policies do not follow it."
  }
}

variable "versioning" {
  description = "Keep deleted objects for 7 days. Off by default: objckpt never overwrites a key, so that versions protect against deletion alone, and every checkpoint that is retired would be paid for 7 days longer."
  type        = bool
  default     = false
  nullable    = false
}

variable "deny_overwrites" {
  description = "Refuse to everyone an upload of a manifest, an index, a record or a probe without If-None-Match. objckpt always sends it. Copying a run into the bucket by other tools needs it off for that time."
  type        = bool
  default     = true
  nullable    = false
}

variable "trainer_trust" {
  description = "Who may take the trainer's role: services (EC2 gets an instance profile), ARNs of principals, and subjects of an OIDC provider of this account (IRSA: system:serviceaccount:NAMESPACE:NAME; may hold *)."
  type = object({
    services   = optional(list(string), ["ec2.amazonaws.com"])
    principals = optional(list(string), [])
    oidc = optional(object({
      provider_arn = string
      subjects     = list(string)
      audience     = optional(string, "sts.amazonaws.com")
    }))
  })
  default  = {}
  nullable = false

  validation {
    condition     = length(var.trainer_trust.services) + length(var.trainer_trust.principals) > 0 || var.trainer_trust.oidc != null
    error_message = "trainer_trust names nobody: give services, principals or oidc."
  }

  validation {
    condition     = alltrue([for service in var.trainer_trust.services : can(regex("^[a-z0-9.-]+\\.amazonaws\\.com(\\.cn)?$", service))])
    error_message = "A service is named such as ec2.amazonaws.com."
  }

  validation {
    condition     = alltrue([for arn in var.trainer_trust.principals : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:(root|role/.+|user/.+)$", arn))])
    error_message = "A principal is the ARN of a role, a user or an account's root; never *."
  }

  validation {
    condition = try(
      can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/.+$", var.trainer_trust.oidc.provider_arn)) &&
      length(var.trainer_trust.oidc.subjects) > 0 &&
      alltrue([for subject in var.trainer_trust.oidc.subjects : can(regex("[^*?]", subject))]),
    var.trainer_trust.oidc == null)
    error_message = "oidc needs the ARN of an OIDC provider and at least one subject, none of them wildcards alone."
  }
}

variable "gc_trust" {
  description = "Who may take the role that deletes, in the form of trainer_trust."
  type = object({
    services   = optional(list(string), ["ec2.amazonaws.com"])
    principals = optional(list(string), [])
    oidc = optional(object({
      provider_arn = string
      subjects     = list(string)
      audience     = optional(string, "sts.amazonaws.com")
    }))
  })
  default  = {}
  nullable = false

  validation {
    condition     = length(var.gc_trust.services) + length(var.gc_trust.principals) > 0 || var.gc_trust.oidc != null
    error_message = "gc_trust names nobody: give services, principals or oidc."
  }

  validation {
    condition     = alltrue([for service in var.gc_trust.services : can(regex("^[a-z0-9.-]+\\.amazonaws\\.com(\\.cn)?$", service))])
    error_message = "A service is named such as ec2.amazonaws.com."
  }

  validation {
    condition     = alltrue([for arn in var.gc_trust.principals : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:(root|role/.+|user/.+)$", arn))])
    error_message = "A principal is the ARN of a role, a user or an account's root; never *."
  }

  validation {
    condition = try(
      can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/.+$", var.gc_trust.oidc.provider_arn)) &&
      length(var.gc_trust.oidc.subjects) > 0 &&
      alltrue([for subject in var.gc_trust.oidc.subjects : can(regex("[^*?]", subject))]),
    var.gc_trust.oidc == null)
    error_message = "oidc needs the ARN of an OIDC provider and at least one subject, none of them wildcards alone."
  }
}

variable "gateway_endpoint" {
  description = "The VPC, and its route tables, whose nodes reach S3 without a NAT gateway and its price per byte. Left out: no endpoint is created. A VPC has one S3 gateway endpoint for all its buckets."
  type = object({
    vpc_id          = string
    route_table_ids = set(string)
  })
  default = null

  validation {
    condition = try(
      startswith(var.gateway_endpoint.vpc_id, "vpc-") && length(var.gateway_endpoint.route_table_ids) > 0,
    var.gateway_endpoint == null)
    error_message = "gateway_endpoint needs a vpc_id (vpc-...) and at least one of its route tables."
  }
}

variable "tags" {
  description = "Tags of everything that takes them."
  type        = map(string)
  default     = {}
  nullable    = false
}
