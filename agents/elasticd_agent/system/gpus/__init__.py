"""NVIDIA GPUs: which ones a job may use, and what NVML says of them, asked in a process of its own."""
