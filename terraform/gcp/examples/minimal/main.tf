# A bucket for one team's runs, and the service accounts of those who train and who clean up.

provider "google" {
  project = "acme-training"
}

module "checkpoints" {
  source = "../.."

  project  = "acme-training"
  bucket   = "acme-checkpoints"
  location = "europe-west4"
}

output "objckpt_toml" {
  description = "The objckpt.toml of a node."
  value       = module.checkpoints.objckpt_toml
}
