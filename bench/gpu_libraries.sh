# Sourced by first_contact.sh and pack.sh: a packed build finds CUDA's libraries, cuDNN and NCCL where PyTorch's are, so that
# both run on the same, or else in the toolkit. Wants $build and $python.
if [[ -d $build/lib ]]; then
  wheels=$(timeout -k 5 60 "$python" -c '
import glob, site, sysconfig
folders = dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()])
print(":".join(lib for folder in folders for lib in sorted(glob.glob(folder + "/nvidia/*/lib"))))' 2>/dev/null || true)
  export LD_LIBRARY_PATH=${wheels:+$wheels:}/usr/local/cuda/lib64:/usr/local/cuda/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
