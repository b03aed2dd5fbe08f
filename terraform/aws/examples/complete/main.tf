# Runs below a prefix, an existing key, nodes in EC2 and pods in EKS, a gc that only a pod may run, and a VPC without NAT.

provider "aws" {
  region = var.region
}

module "checkpoints" {
  source = "../.."

  bucket      = "acme-checkpoints"
  prefix      = "language/runs"
  name        = "acme-language"
  kms_key_arn = var.kms_key_arn
  versioning  = true

  checkpoint = {
    run      = "llama-7b"
    cache    = "/local_nvme"
    interval = 500
    keep     = 3
  }

  trainer_trust = {
    services = ["ec2.amazonaws.com"]
    oidc = {
      provider_arn = var.oidc_provider_arn
      subjects     = ["system:serviceaccount:training:*"]
    }
  }

  gc_trust = {
    services = []
    oidc = {
      provider_arn = var.oidc_provider_arn
      subjects     = ["system:serviceaccount:training:objckpt-gc"]
    }
  }

  gateway_endpoint = {
    vpc_id          = var.vpc_id
    route_table_ids = var.route_table_ids
  }

  tags = { team = "language" }
}
