"""Benchmarks for those who work on Quire, run from a checkout. What users measure with is `quire bench`.

python -m benchmarks.scheduler      planning a step, without a model
python -m benchmarks.cpu_kernels    the native CPU kernels
python -m benchmarks.llamacpp       llama.cpp and Quire in turn on one GGUF file
python -m benchmarks.gpu            the GPU table: workloads end to end, and a step's time by part
python -m benchmarks.gpu_kernels    the GPU kernels, and the configurations that suit them
python -m benchmarks.gpu_sampling   sampling on a GPU
python -m benchmarks.sends          a prompt's blocks on their way to another engine
python -m benchmarks.http_cost      processor time of a server and the router beside the model
python -m benchmarks.soak           a server under load and under clients that hang up
"""
