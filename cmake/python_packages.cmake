# Python package directories: PyTorch's wheels contain cuDNN and NCCL, the cudnn-frontend wheel contains headers.
include_guard()

# tessera_python_packages(result): the package directories of TESSERA_PYTHON, or of the first Python in PATH.
function(tessera_python_packages result)
  find_program(python_PROGRAM python3)
  mark_as_advanced(python_PROGRAM)
  set(python ${python_PROGRAM})
  if(EXISTS "$ENV{TESSERA_PYTHON}")
    set(python $ENV{TESSERA_PYTHON})
  endif()
  set(directories "")
  if(python)
    execute_process(COMMAND ${python} -c "import site, sysconfig; print(';'.join([sysconfig.get_path('purelib'), *site.getsitepackages(), site.getusersitepackages()]))"
      OUTPUT_VARIABLE directories OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${result} "${directories}" PARENT_SCOPE)
endfunction()
