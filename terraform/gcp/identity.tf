# Two service accounts. The trainer's may not delete: a job that goes wrong, or is taken over, cannot destroy what is committed.
# In Cloud Storage that includes to overwrite, which objckpt never needs to do with other bytes.

locals {
  folder  = var.prefix == "" ? "" : "${var.prefix}/"
  objects = "projects/_/buckets/${var.bucket}/objects/${local.folder}"

  # A list is a request to the bucket; which prefix it asks for stands in an attribute of the request.
  inside = "resource.name.startsWith(\"${local.objects}\") || api.getAttribute(\"storage.googleapis.com/objectListPrefix\", \"\").startsWith(\"${local.folder}\")"

  roles = {
    trainer = {
      title = "objckpt trainer"
      permissions = [
        "storage.multipartUploads.abort",
        "storage.multipartUploads.create",
        "storage.objects.create",
        "storage.objects.get",
        "storage.objects.list",
      ]
    }
    gc = {
      title = "objckpt gc"
      permissions = [
        "storage.multipartUploads.abort",
        "storage.objects.delete",
        "storage.objects.get",
        "storage.objects.list",
      ]
    }
  }

  users = merge(
    { for member in var.trainer_users : "trainer ${member}" => { role = "trainer", member = member } },
    { for member in var.gc_users : "gc ${member}" => { role = "gc", member = member } },
  )
}

resource "google_service_account" "this" {
  for_each     = local.roles
  project      = var.project
  account_id   = "${var.name}-${each.key}"
  display_name = "${each.value.title} (${var.bucket})"
}

resource "google_project_iam_custom_role" "this" {
  for_each    = local.roles
  project     = var.project
  role_id     = "${replace(var.name, "-", "_")}_${each.key}"
  title       = "${each.value.title} (${var.bucket})"
  permissions = each.value.permissions
}

resource "google_storage_bucket_iam_member" "this" {
  for_each = local.roles
  bucket   = google_storage_bucket.this.name
  role     = google_project_iam_custom_role.this[each.key].id
  member   = google_service_account.this[each.key].member

  dynamic "condition" {
    for_each = var.prefix == "" ? [] : [var.prefix]

    content {
      title       = "below ${condition.value}"
      description = "Objects below the prefix, and lists of them."
      expression  = local.inside
    }
  }
}

# Unfinished uploads are listed by a request to the bucket that tells its prefix in no attribute. It shows names alone.
resource "google_project_iam_custom_role" "uploads" {
  project     = var.project
  role_id     = "${replace(var.name, "-", "_")}_uploads"
  title       = "objckpt gc: list unfinished uploads (${var.bucket})"
  permissions = ["storage.multipartUploads.list"]
}

resource "google_storage_bucket_iam_member" "uploads" {
  bucket = google_storage_bucket.this.name
  role   = google_project_iam_custom_role.uploads.id
  member = google_service_account.this["gc"].member
}

resource "google_service_account_iam_member" "users" {
  for_each           = local.users
  service_account_id = google_service_account.this[each.value.role].name
  role               = "roles/iam.workloadIdentityUser"
  member             = each.value.member
}
