# The bucket. A key in it only ever gets one content, and objckpt alone knows which objects a run still needs: so nothing here
# deletes an object because of its age.

data "aws_partition" "current" {}
data "aws_region" "current" {}
data "aws_caller_identity" "current" {}

locals {
  # Computed, not read back, so that a plan shows whole policies.
  bucket_arn  = "arn:${data.aws_partition.current.partition}:s3:::${var.bucket}"
  folder      = var.prefix == "" ? "" : "${var.prefix}/"
  objects_arn = "${local.bucket_arn}/${local.folder}*"
  kms_key_arn = var.kms_key_arn == null ? aws_kms_key.this[0].arn : var.kms_key_arn

  # What objckpt writes with If-None-Match. Shards are not among it: a restarted uploader puts the same bytes again.
  created_once = ["manifest/*.json", "index/*.json", "records/*.json", "probe/????????????????????????"]

  statements = concat(
    [
      {
        Sid       = "DenyPlaintext"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      {
        Sid       = "DenyOldTLS"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
        Condition = { NumericLessThan = { "s3:TlsVersion" = "1.2" } }
      },
    ],
    [
      for deny in var.deny_overwrites ? [true] : [] : {
        Sid       = "DenyOverwrites"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource = flatten([
          for pattern in local.created_once :
          ["${local.bucket_arn}/${local.folder}${pattern}", "${local.bucket_arn}/${local.folder}*/${pattern}"]
        ])
        Condition = {
          Null = { "s3:if-none-match" = "true" }
          # False for the beginning and the parts of a multipart upload, which take no such header.
          Bool = { "s3:ObjectCreationOperation" = "true" }
        }
      }
    ],
  )
}

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_18:Access logs are the account's choice: CloudTrail data events, or a bucket for logs that this module should not own
  #checkov:skip=CKV_AWS_21:Keys are never overwritten, and every retired checkpoint would be paid for longer; the variable versioning turns it on
  #checkov:skip=CKV_AWS_144:A checkpoint serves the region that trains; a copy in another would double storage and add transfer to every save
  #checkov:skip=CKV2_AWS_62:Nothing waits for events: a reader lists the manifest, which is strongly consistent
  bucket        = var.bucket
  force_destroy = false # checkpoints are deleted by gc, or by a person who means it
  tags          = var.tags
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

# The bucket's default, so that no client has to name the key. The bucket key spares one KMS request per object.
resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    bucket_key_enabled = true

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = local.kms_key_arn
    }
  }
}

resource "aws_kms_key" "this" {
  count                   = var.kms_key_arn == null ? 1 : 0
  description             = "Checkpoints in s3://${var.bucket}"
  enable_key_rotation     = true
  deletion_window_in_days = 30 # without the key every checkpoint is lost
  tags                    = var.tags

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "LetIAMPoliciesDecide"
      Effect    = "Allow"
      Principal = { AWS = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:root" }
      Action    = "kms:*"
      Resource  = "*"
    }]
  })
}

# Only where it is wanted: a bucket that never had versions deletes for good, a suspended one leaves a marker for each key.
resource "aws_s3_bucket_versioning" "this" {
  count  = var.versioning ? 1 : 0
  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  # Parts of uploads that nobody finished are billed and not listed. No upload of objckpt lives for days.
  rule {
    id     = "abort-unfinished-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 3
    }
  }

  # Without effect while there are no versions; stays for those that are left when versioning is turned off again.
  rule {
    id     = "expire-deleted-versions"
    status = "Enabled"

    filter {}

    expiration {
      expired_object_delete_marker = true
    }

    noncurrent_version_expiration {
      noncurrent_days = 7
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.statements })

  # S3 refuses two changes of a bucket's access at once.
  depends_on = [aws_s3_bucket_public_access_block.this]
}

# No policy of its own: an endpoint serves every S3 bucket that the VPC's nodes use, package mirrors and images among them.
resource "aws_vpc_endpoint" "s3" {
  count             = var.gateway_endpoint == null ? 0 : 1
  vpc_id            = var.gateway_endpoint.vpc_id
  service_name      = "com.amazonaws.${data.aws_region.current.id}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.gateway_endpoint.route_table_ids
  tags              = merge(var.tags, { Name = "${var.bucket}-s3" })
}
