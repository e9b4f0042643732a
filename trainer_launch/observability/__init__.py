"""Status for people and machines: progress, events, metrics, the node's own view. Nothing here may harm the job."""
