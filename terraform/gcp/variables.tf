variable "project" {
  description = "Id of the project that bucket, service accounts and custom roles are created in."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "project is a project's id, such as acme-training: not its name, not its number."
  }
}

variable "bucket" {
  description = "Name of the bucket to create."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]$", var.bucket)) && !startswith(var.bucket, "goog")
    error_message = "A bucket's name has 3 to 63 characters: lower-case letters, digits, hyphens and underscores, with a letter or digit at both ends; it does not begin with goog."
  }
}

variable "location" {
  description = "Region of the bucket: that of the nodes, or every byte crosses regions."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9-]+$", var.location))
    error_message = "location is a region such as europe-west4."
  }
}

variable "prefix" {
  description = "Folder of the bucket that the runs lie in, as PREFIX/RUN. The service accounts reach no object outside it. Empty: the whole bucket."
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
  description = "What the names of service accounts and custom roles begin with; two of these modules in one project need two names."
  type        = string
  default     = "objckpt"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,20}[a-z0-9]$", var.name))
    error_message = "A name has 4 to 22 characters: lower-case letters, digits and hyphens; it begins with a letter and does not end with a hyphen."
  }
}

variable "kms_key" {
  description = "Id of the KMS key that encrypts the bucket, in the bucket's location. Left out: Google's own keys. Cloud Storage's service agent of the project is given the use of it."
  type        = string
  default     = null

  validation {
    condition     = can(regex("^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$", var.kms_key)) || var.kms_key == null
    error_message = "kms_key is projects/P/locations/L/keyRings/R/cryptoKeys/K."
  }
}

variable "trainer_users" {
  description = "Workload identities that may act as the trainer's service account, such as serviceAccount:PROJECT.svc.id.goog[NAMESPACE/NAME] for pods in GKE. Virtual machines have it attached and need no entry."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for member in var.trainer_users : can(regex("^(serviceAccount:[^/]+\\.svc\\.id\\.goog\\[[^/]+/[^/]+\\]|principal(Set)?://.+)$", member))])
    error_message = "A member is serviceAccount:PROJECT.svc.id.goog[NAMESPACE/NAME], or begins with principal:// or principalSet://."
  }
}

variable "gc_users" {
  description = "Workload identities that may act as the service account that deletes, in the form of trainer_users."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for member in var.gc_users : can(regex("^(serviceAccount:[^/]+\\.svc\\.id\\.goog\\[[^/]+/[^/]+\\]|principal(Set)?://.+)$", member))])
    error_message = "A member is serviceAccount:PROJECT.svc.id.goog[NAMESPACE/NAME], or begins with principal:// or principalSet://."
  }
}

variable "labels" {
  description = "Labels of the bucket."
  type        = map(string)
  default     = {}
  nullable    = false
}
