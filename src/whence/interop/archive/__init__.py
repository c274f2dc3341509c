"""Programs in files: plain data and safetensors in a zip, and nothing that runs."""
