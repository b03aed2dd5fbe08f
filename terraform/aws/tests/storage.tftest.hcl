# Each run costs a start of the provider, seconds of a processor: so few runs, with many assertions.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }
  mock_data "aws_region" {
    defaults = { id = "eu-west-1", name = "eu-west-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
}

variables {
  bucket = "acme-checkpoints"
}

# A bucket and its roles as the minimal example makes them.
run "unit_defaults" {
  command = apply

  assert {
    condition     = aws_s3_bucket.this.force_destroy == false
    error_message = "a destroy must not take checkpoints along"
  }
  assert {
    condition     = one(aws_s3_bucket_ownership_controls.this.rule).object_ownership == "BucketOwnerEnforced"
    error_message = "ACLs must be off"
  }
  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this.block_public_acls,
      aws_s3_bucket_public_access_block.this.block_public_policy,
      aws_s3_bucket_public_access_block.this.ignore_public_acls,
      aws_s3_bucket_public_access_block.this.restrict_public_buckets,
    ])
    error_message = "all four kinds of public access must be blocked"
  }
  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this.rule).bucket_key_enabled
    error_message = "without a bucket key every request is one to KMS"
  }
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default).kms_master_key_id == aws_kms_key.this[0].arn
    error_message = "the created key must encrypt the bucket"
  }
  assert {
    condition     = jsondecode(aws_kms_key.this[0].policy).Statement[0].Principal.AWS == "arn:aws:iam::123456789012:root"
    error_message = "the key belongs to this account"
  }
  assert {
    condition     = length(aws_s3_bucket_versioning.this) == 0 && length(aws_vpc_endpoint.s3) == 0
    error_message = "versions and an endpoint are made only where they are asked for"
  }
  assert {
    condition     = output.objckpt_toml == <<-EOT
      [checkpoint]
      uri = "s3://acme-checkpoints/main"

      [checkpoint.storage_options]
      client_kwargs = { region_name = "eu-west-1" }
    EOT
    error_message = "another objckpt.toml: ${output.objckpt_toml}"
  }
  assert {
    condition = alltrue(flatten([
      for rule in aws_s3_bucket_lifecycle_configuration.this.rule : concat(
        [for expiration in rule.expiration : try(expiration.days, 0) == 0 || expiration.days == null],
        [length(rule.transition) == 0],
      )
    ]))
    error_message = "a rule expires or moves objects by their age: the newest checkpoint of a paused run would go"
  }
  assert {
    condition     = one(flatten([for rule in aws_s3_bucket_lifecycle_configuration.this.rule : rule.abort_incomplete_multipart_upload[*].days_after_initiation])) == 3
    error_message = "unfinished uploads must go after 3 days"
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.this["trainer"].policy).Statement[1].Resource == "arn:aws:s3:::acme-checkpoints/*"
    error_message = "without a prefix the role reaches the whole bucket"
  }
  assert {
    condition     = !can(jsondecode(aws_iam_role_policy.this["trainer"].policy).Statement[0].Condition)
    error_message = "without a prefix a list needs none"
  }
  assert {
    condition = alltrue([
      for role in aws_iam_role.this : jsondecode(role.assume_role_policy).Statement == [
        { Sid = "Services", Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = ["ec2.amazonaws.com"] } },
      ]
    ])
    error_message = "only EC2 may take the roles"
  }
  assert {
    condition     = output.trainer_instance_profile == "acme-checkpoints-trainer" && output.gc_instance_profile == "acme-checkpoints-gc"
    error_message = "EC2 takes a role by an instance profile"
  }
}

run "unit_below_a_prefix" {
  command = plan
  variables {
    prefix      = "team/runs"
    kms_key_arn = "arn:aws:kms:eu-west-1:123456789012:key/0d3f"
  }

  assert {
    condition = [for statement in jsondecode(aws_s3_bucket_policy.this.policy).Statement : [statement.Sid, statement.Effect, statement.Principal]] == [
      ["DenyPlaintext", "Deny", "*"], ["DenyOldTLS", "Deny", "*"], ["DenyOverwrites", "Deny", "*"],
    ]
    error_message = "the policy only ever denies, and to everyone"
  }
  assert {
    condition = [for statement in jsondecode(aws_s3_bucket_policy.this.policy).Statement : jsonencode(statement.Condition)] == [
      jsonencode({ Bool = { "aws:SecureTransport" = "false" } }),
      jsonencode({ NumericLessThan = { "s3:TlsVersion" = "1.2" } }),
      jsonencode({ Bool = { "s3:ObjectCreationOperation" = "true" }, Null = { "s3:if-none-match" = "true" } }),
    ]
    error_message = "other conditions: ${aws_s3_bucket_policy.this.policy}"
  }
  assert {
    condition     = contains(jsondecode(aws_s3_bucket_policy.this.policy).Statement[2].Resource, "arn:aws:s3:::acme-checkpoints/team/runs/*/manifest/*.json")
    error_message = "manifests below the prefix must be protected"
  }
  assert {
    condition = toset(flatten([for statement in jsondecode(aws_iam_role_policy.this["trainer"].policy).Statement : statement.Action])) == toset([
      "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "kms:GenerateDataKey", "kms:Decrypt",
    ])
    error_message = "other actions: ${aws_iam_role_policy.this["trainer"].policy}"
  }
  assert {
    condition = toset(flatten([for statement in jsondecode(aws_iam_role_policy.this["gc"].policy).Statement : statement.Action])) == toset([
      "s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "kms:Decrypt",
    ])
    error_message = "other actions: ${aws_iam_role_policy.this["gc"].policy}"
  }
  assert {
    condition = alltrue(flatten([
      for policy in aws_iam_role_policy.this : [
        for statement in jsondecode(policy.policy).Statement : {
          List          = statement.Resource == "arn:aws:s3:::acme-checkpoints" && try(statement.Condition.StringLike["s3:prefix"], []) == ["team/runs/*"]
          ListUploads   = statement.Action == ["s3:ListBucketMultipartUploads"] && statement.Resource == "arn:aws:s3:::acme-checkpoints" && !can(statement.Condition)
          ReadAndWrite  = statement.Resource == "arn:aws:s3:::acme-checkpoints/team/runs/*"
          ReadAndDelete = statement.Resource == "arn:aws:s3:::acme-checkpoints/team/runs/*"
          Encrypt       = statement.Resource == var.kms_key_arn && try(statement.Condition.StringEquals["kms:ViaService"], "") == "s3.eu-west-1.amazonaws.com"
          Decrypt       = statement.Resource == var.kms_key_arn && try(statement.Condition.StringEquals["kms:ViaService"], "") == "s3.eu-west-1.amazonaws.com"
        }[statement.Sid]
      ]
    ]))
    error_message = "a statement reaches further: ${jsonencode(values(aws_iam_role_policy.this)[*].policy)}"
  }
}

run "unit_options" {
  command = apply
  variables {
    deny_overwrites  = false
    prefix           = "team"
    kms_key_arn      = "arn:aws:kms:eu-west-1:123456789012:key/0d3f"
    versioning       = true
    checkpoint       = { run = "a/b", cache = "/nvme \"1\"", interval = 500, keep = 3 }
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = ["rtb-1", "rtb-2"] }
    tags             = { team = "language" }
    name             = "acme"
    trainer_trust = {
      services   = []
      principals = ["arn:aws:iam::123456789012:role/slurm"]
      oidc = {
        provider_arn = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/AB12"
        subjects     = ["system:serviceaccount:training:*"]
      }
    }
  }

  assert {
    condition     = length(aws_kms_key.this) == 0 && output.kms_key_arn == "arn:aws:kms:eu-west-1:123456789012:key/0d3f"
    error_message = "a given key is used, and none is made"
  }
  assert {
    condition     = one(aws_s3_bucket_versioning.this[0].versioning_configuration).status == "Enabled"
    error_message = "versioning was asked for"
  }
  assert {
    condition     = aws_vpc_endpoint.s3[0].service_name == "com.amazonaws.eu-west-1.s3" && aws_vpc_endpoint.s3[0].vpc_endpoint_type == "Gateway"
    error_message = "the endpoint must be S3's gateway, which is free"
  }
  assert {
    condition     = aws_s3_bucket.this.tags.team == "language" && aws_iam_role.this["trainer"].tags.team == "language"
    error_message = "tags go everywhere"
  }
  assert {
    condition     = output.objckpt_toml == <<-EOT
      [checkpoint]
      uri = "s3://acme-checkpoints/team/a/b"
      cache = "/nvme \"1\""
      interval = 500
      keep = 3

      [checkpoint.storage_options]
      client_kwargs = { region_name = "eu-west-1" }
    EOT
    error_message = "another objckpt.toml: ${output.objckpt_toml}"
  }
  assert {
    condition     = [for statement in jsondecode(aws_s3_bucket_policy.this.policy).Statement : statement.Sid] == ["DenyPlaintext", "DenyOldTLS"]
    error_message = "the rule can be turned off, TLS cannot"
  }
  assert {
    condition = jsondecode(aws_iam_role.this["trainer"].assume_role_policy).Statement == [
      { Sid = "Principals", Effect = "Allow", Action = "sts:AssumeRole", Principal = { AWS = ["arn:aws:iam::123456789012:role/slurm"] } },
      {
        Sid       = "OIDC"
        Effect    = "Allow"
        Action    = "sts:AssumeRoleWithWebIdentity"
        Principal = { Federated = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/AB12" }
        Condition = {
          StringEquals = { "oidc.eks.eu-west-1.amazonaws.com/id/AB12:aud" = "sts.amazonaws.com" }
          StringLike   = { "oidc.eks.eu-west-1.amazonaws.com/id/AB12:sub" = ["system:serviceaccount:training:*"] }
        }
      },
    ]
    error_message = "other trust: ${aws_iam_role.this["trainer"].assume_role_policy}"
  }
  assert {
    condition     = output.trainer_instance_profile == null && output.gc_instance_profile == "acme-gc"
    error_message = "no instance profile where EC2 is not trusted"
  }
}
