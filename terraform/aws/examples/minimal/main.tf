# A bucket for one team's runs, and the roles of the nodes that train.

provider "aws" {
  region = "eu-west-1"
}

module "checkpoints" {
  source = "../.."

  bucket = "acme-checkpoints"
}

output "objckpt_toml" {
  description = "The objckpt.toml of a node."
  value       = module.checkpoints.objckpt_toml
}
