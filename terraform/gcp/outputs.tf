output "bucket" {
  description = "Name of the bucket."
  value       = google_storage_bucket.this.name
}

output "gc_service_account" {
  description = "E-mail address of the service account that deletes."
  value       = google_service_account.this["gc"].email
}

output "objckpt_toml" {
  description = "The objckpt.toml of a node: put it into the job's working directory, or where OBJCKPT_CONFIG says."
  value = join("\n", concat(
    ["[checkpoint]", "uri = ${jsonencode("gs://${var.bucket}/${local.folder}${var.checkpoint.run}")}"],
    [for name in ["cache", "interval", "keep"] : "${name} = ${jsonencode(var.checkpoint[name])}" if var.checkpoint[name] != null],
    ["", "[checkpoint.storage_options]", "project = ${jsonencode(var.project)}", ""],
  ))
}

output "trainer_service_account" {
  description = "E-mail address of the trainer's service account: attach it to the virtual machines."
  value       = google_service_account.this["trainer"].email
}
