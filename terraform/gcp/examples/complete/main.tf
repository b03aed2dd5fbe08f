# Runs below a prefix, a key of one's own, pods in GKE that train, and one that runs gc.

provider "google" {
  project = "acme-training"
}

module "checkpoints" {
  source = "../.."

  project  = "acme-training"
  bucket   = "acme-checkpoints"
  location = "europe-west4"
  prefix   = "language/runs"
  name     = "acme-language"
  kms_key  = "projects/acme-training/locations/europe-west4/keyRings/storage/cryptoKeys/checkpoints"

  checkpoint = {
    run      = "llama-7b"
    cache    = "/local_nvme"
    interval = 500
    keep     = 3
  }

  trainer_users = ["serviceAccount:acme-training.svc.id.goog[training/trainer]"]
  gc_users      = ["serviceAccount:acme-training.svc.id.goog[training/objckpt-gc]"]
  labels        = { team = "language" }
}
