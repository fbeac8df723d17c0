# Sourced in the checkout's root by what runs on a GPU machine without a package index: unpacks what .gpu/ holds once
# into $PREFIX (/opt), and sets what every process there needs.
#
# .gpu/{engine,ray,trainer}.tar.xz hold SGLang, Ray (with msgspec and pyzmq), and nemo-automodel with megatron-core for
# the machine's own Python and torch.
PREFIX=${PREFIX:-/opt}
LIMIT_S=${LIMIT_S:-570}

for name in engine ray trainer; do
  archive=.gpu/$name.tar.xz
  if [ -f "$archive" ] && [ ! -e "$PREFIX/$name/.complete" ]; then
    mkdir -p "$PREFIX/$name"
    (xz -dc -T0 "$archive" | tar -C "$PREFIX/$name" -xf - && touch "$PREFIX/$name/.complete") &
  fi
done
wait

export HF_HUB_OFFLINE=1 SGLANG_IS_FLASHINFER_AVAILABLE=false NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export PYTHONPATH=$PREFIX/ray
