# The bucket. A key in it only ever gets one content, and objckpt alone knows which objects a run still needs: so nothing here
# deletes an object because of its age.

resource "google_storage_bucket" "this" {
  #checkov:skip=CKV_GCP_62:Access logs are the project's choice: audit logs of data access, or a bucket for logs that this module should not own
  #checkov:skip=CKV_GCP_78:Keys are never overwritten, so versions would protect against deletion alone, and every retired checkpoint would be paid for longer
  name                        = var.bucket
  project                     = var.project
  location                    = var.location
  storage_class               = "STANDARD" # what is retired within hours must not pay for a month
  force_destroy               = false      # checkpoints are deleted by gc, or by a person who means it
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  labels                      = var.labels

  # On by default, and paid: a run that keeps 3 checkpoints and saves every half hour would pay for 7 days of them.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  versioning {
    enabled = false
  }

  # Parts of uploads that nobody finished are billed and not listed. No upload of objckpt lives for days.
  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }

    condition {
      age = 3
    }
  }

  dynamic "encryption" {
    for_each = var.kms_key[*]

    content {
      default_kms_key_name = encryption.value
    }
  }

  depends_on = [google_kms_crypto_key_iam_member.storage]
}

data "google_storage_project_service_account" "this" {
  count   = var.kms_key == null ? 0 : 1
  project = var.project
}

resource "google_kms_crypto_key_iam_member" "storage" {
  count         = var.kms_key == null ? 0 : 1
  crypto_key_id = var.kms_key
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = "serviceAccount:${data.google_storage_project_service_account.this[0].email_address}"
}
