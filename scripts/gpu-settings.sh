# Sourced behind settings.sh: a Python with vLLM and our package on its path, for what runs without containers.
# WEIGHTKEEPER_SITE names a directory with vLLM's packages where they are not installed.
site=${WEIGHTKEEPER_SITE:-}
has_vllm() { "$PYTHON" -c 'import importlib.util as i, sys; sys.exit(i.find_spec("vllm") is None)'; }
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -z "$site" ] && ! has_vllm && [ -x "$ROOT/.venv/bin/python" ]; then
    PYTHON=$ROOT/.venv/bin/python
  fi
fi
# An installed package tells its plugins by its metadata; a source tree has none.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/sidecar/pyproject.toml")
metadata=$WORK/site/weightkeeper-$version.dist-info
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: weightkeeper\nVersion: %s\n' "$version" > "$metadata/METADATA"
printf '[vllm.general_plugins]\nweightkeeper = weightkeeper.plugin:register\n' > "$metadata/entry_points.txt"
export PYTHONPATH="$ROOT/sidecar:$WORK/site${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
if has_gpu; then
  # FlashInfer and DeepGEMM compile at run time, for which a machine may lack what they need.
  export VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}" VLLM_USE_DEEP_GEMM="${VLLM_USE_DEEP_GEMM:-0}"
else
  export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1
fi
has_vllm || die "$PYTHON has no vllm: install it, or name its directory in WEIGHTKEEPER_SITE, or run make venv"
