# Several wrong values a run: each run costs a start of the provider.

mock_provider "aws" {}

variables {
  bucket = "acme-checkpoints"
}

run "unit_refused" {
  command = plan
  variables {
    bucket           = "Acme.Checkpoints"
    prefix           = "/runs/"
    checkpoint       = { keep = 1 }
    name             = "two words"
    kms_key_arn      = "alias/checkpoints"
    trainer_trust    = { services = [] }
    gc_trust         = { principals = ["*"] }
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = [] }
  }
  expect_failures = [
    var.bucket, var.prefix, var.checkpoint, var.name, var.kms_key_arn, var.trainer_trust, var.gc_trust, var.gateway_endpoint,
  ]
}

run "unit_refused_too" {
  command = plan
  variables {
    bucket        = "acme--use1-az4--x-s3"
    prefix        = "runs/*"
    checkpoint    = { run = "../other" }
    kms_key_arn   = "arn:aws:kms:eu-west-1:123456789012:alias/checkpoints"
    trainer_trust = { services = ["ec2"] }
    gc_trust      = { oidc = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/oidc.example", subjects = ["*"] } }
  }
  expect_failures = [var.bucket, var.prefix, var.checkpoint, var.kms_key_arn, var.trainer_trust, var.gc_trust]
}

run "unit_refused_as_well" {
  command = plan
  variables {
    prefix        = "a//b"
    checkpoint    = { cache = "nvme", interval = 0.5 }
    trainer_trust = { oidc = { provider_arn = "oidc.example", subjects = ["a"] } }
    gc_trust      = { oidc = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/oidc.example", subjects = [] } }
  }
  expect_failures = [var.prefix, var.checkpoint, var.trainer_trust, var.gc_trust]
}
