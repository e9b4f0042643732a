"""This node's GPUs: what NVIDIA's library says of them, and how they do under a load of ours."""
