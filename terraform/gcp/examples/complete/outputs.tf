output "objckpt_toml" {
  description = "The objckpt.toml of a node."
  value       = module.checkpoints.objckpt_toml
}

output "trainer_service_account" {
  description = "For the annotation iam.gke.io/gcp-service-account of the pods' service account."
  value       = module.checkpoints.trainer_service_account
}

output "gc_service_account" {
  description = "For the service account of the pod that runs gc."
  value       = module.checkpoints.gc_service_account
}
