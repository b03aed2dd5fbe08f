variable "region" {
  description = "Region of bucket and nodes: traffic between regions is slow and billed."
  type        = string
  default     = "eu-west-1"
}

variable "kms_key_arn" {
  description = "ARN of an existing KMS key."
  type        = string
}

variable "oidc_provider_arn" {
  description = "ARN of the EKS cluster's OIDC provider."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the nodes."
  type        = string
}

variable "route_table_ids" {
  description = "Route tables of the nodes' subnets."
  type        = set(string)
}
