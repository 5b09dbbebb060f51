# Compiles one .cu file and keeps what ptxas reports of registers and spills: printed into the build's
# log, read by a test.
execute_process(
  COMMAND ${NVCC} -c ${SOURCE} -o ${OBJECT} -I${ROOT} ${CODES} -std=c++17 -O3 -lineinfo
          -Werror all-warnings -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra,-D_GNU_SOURCE,-ffp-contract=off
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE report)
file(WRITE ${REPORT} "${report}")
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${report}${output}")
endif()
message("${report}")
