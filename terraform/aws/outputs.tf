output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.id

  # Who uses the name may write at once, into a bucket that is whole.
  depends_on = [
    aws_s3_bucket_lifecycle_configuration.this,
    aws_s3_bucket_ownership_controls.this,
    aws_s3_bucket_policy.this,
    aws_s3_bucket_public_access_block.this,
    aws_s3_bucket_server_side_encryption_configuration.this,
    aws_s3_bucket_versioning.this,
  ]
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.this.arn
}

output "gc_instance_profile" {
  description = "Name of the instance profile with the role that deletes; null if gc_trust leaves EC2 out."
  value       = try(aws_iam_instance_profile.this["gc"].name, null)
}

output "gc_role_arn" {
  description = "ARN of the role that deletes."
  value       = aws_iam_role.this["gc"].arn
}

output "kms_key_arn" {
  description = "ARN of the key that encrypts the bucket."
  value       = local.kms_key_arn
}

output "objckpt_toml" {
  description = "The objckpt.toml of a node: put it into the job's working directory, or where OBJCKPT_CONFIG says."
  value = join("\n", concat(
    ["[checkpoint]", "uri = ${jsonencode("s3://${var.bucket}/${local.folder}${var.checkpoint.run}")}"],
    [for name in ["cache", "interval", "keep"] : "${name} = ${jsonencode(var.checkpoint[name])}" if var.checkpoint[name] != null],
    ["", "[checkpoint.storage_options]", "client_kwargs = { region_name = ${jsonencode(data.aws_region.current.id)} }", ""],
  ))
}

output "trainer_instance_profile" {
  description = "Name of the instance profile with the trainer's role; null if trainer_trust leaves EC2 out."
  value       = try(aws_iam_instance_profile.this["trainer"].name, null)
}

output "trainer_role_arn" {
  description = "ARN of the trainer's role."
  value       = aws_iam_role.this["trainer"].arn
}

output "vpc_endpoint_id" {
  description = "Id of the S3 gateway endpoint; null without one."
  value       = one(aws_vpc_endpoint.s3[*].id)
}
