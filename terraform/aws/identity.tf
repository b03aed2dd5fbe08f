# Two roles, each with exactly the actions that objckpt calls in that part; tests/test_terraform_aws.py records the calls.

locals {
  name = var.name == null ? substr(var.bucket, 0, 56) : var.name

  listing = merge(
    { Effect = "Allow", Resource = local.bucket_arn },
    var.prefix == "" ? {} : { Condition = { StringLike = { "s3:prefix" = ["${local.folder}*"] } } },
  )
  decryption = {
    Effect    = "Allow"
    Resource  = local.kms_key_arn
    Condition = { StringEquals = { "kms:ViaService" = "s3.${data.aws_region.current.id}.${data.aws_partition.current.dns_suffix}" } }
  }

  roles = {
    # Writes and reads checkpoints. May not delete: a job that goes wrong, or is taken over, cannot destroy what is committed.
    trainer = {
      description = "Training jobs: save and restore checkpoints in s3://${var.bucket}/${local.folder}"
      trust       = var.trainer_trust
      statements = [
        merge(local.listing, { Sid = "List", Action = ["s3:ListBucket"] }),
        {
          Sid      = "ReadAndWrite"
          Effect   = "Allow"
          Action   = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
          Resource = local.objects_arn
        },
        # Completing a multipart upload decrypts.
        merge(local.decryption, { Sid = "Encrypt", Action = ["kms:GenerateDataKey", "kms:Decrypt"] }),
      ]
    }
    # Deletes what no version of a run reaches, and unfinished uploads. May not write.
    gc = {
      description = "objckpt gc: delete what no checkpoint reaches in s3://${var.bucket}/${local.folder}"
      trust       = var.gc_trust
      statements = [
        merge(local.listing, { Sid = "List", Action = ["s3:ListBucket"] }),
        # S3 knows no s3:prefix for this action: with such a condition it would always be refused.
        { Sid = "ListUploads", Effect = "Allow", Action = ["s3:ListBucketMultipartUploads"], Resource = local.bucket_arn },
        {
          Sid      = "ReadAndDelete"
          Effect   = "Allow"
          Action   = ["s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
          Resource = local.objects_arn
        },
        merge(local.decryption, { Sid = "Decrypt", Action = ["kms:Decrypt"] }),
      ]
    }
  }
}

resource "aws_iam_role" "this" {
  for_each    = local.roles
  name        = "${local.name}-${each.key}"
  description = each.value.description
  tags        = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        for services in length(each.value.trust.services) == 0 ? [] : [each.value.trust.services] :
        { Sid = "Services", Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = services } }
      ],
      [
        for principals in length(each.value.trust.principals) == 0 ? [] : [each.value.trust.principals] :
        { Sid = "Principals", Effect = "Allow", Action = "sts:AssumeRole", Principal = { AWS = principals } }
      ],
      [
        for oidc in each.value.trust.oidc[*] : {
          Sid       = "OIDC"
          Effect    = "Allow"
          Action    = "sts:AssumeRoleWithWebIdentity"
          Principal = { Federated = oidc.provider_arn }
          Condition = {
            StringEquals = { "${split("oidc-provider/", oidc.provider_arn)[1]}:aud" = oidc.audience }
            StringLike   = { "${split("oidc-provider/", oidc.provider_arn)[1]}:sub" = oidc.subjects }
          }
        }
      ],
    )
  })
}

resource "aws_iam_role_policy" "this" {
  for_each = local.roles
  name     = "checkpoints"
  role     = aws_iam_role.this[each.key].id
  policy   = jsonencode({ Version = "2012-10-17", Statement = each.value.statements })
}

resource "aws_iam_instance_profile" "this" {
  for_each = { for key, role in local.roles : key => role if contains(role.trust.services, "ec2.amazonaws.com") }
  name     = "${local.name}-${each.key}"
  role     = aws_iam_role.this[each.key].name
  tags     = var.tags
}
