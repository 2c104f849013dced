# docker build -t megatron-patched .   The tag of the base has the torch of constraints.txt.
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
# Triton compiles its launchers, and setup.py the update in host memory.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron
COPY . .
RUN PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir -c constraints.txt .
