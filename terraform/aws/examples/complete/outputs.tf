output "objckpt_toml" {
  description = "The objckpt.toml of a node."
  value       = module.checkpoints.objckpt_toml
}

output "trainer_instance_profile" {
  description = "For the launch template of the nodes."
  value       = module.checkpoints.trainer_instance_profile
}

output "trainer_role_arn" {
  description = "For the annotation eks.amazonaws.com/role-arn of the pods' service account."
  value       = module.checkpoints.trainer_role_arn
}

output "gc_role_arn" {
  description = "For the service account of the pod that runs gc."
  value       = module.checkpoints.gc_role_arn
}
