# SPDX-License-Identifier: Apache-2.0
# The fuzz targets: one program for each reader of the extension, with clang's libFuzzer
# and its sanitizers of memory and of undefined behaviour. `make fuzz` runs them.

if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "JAX_CUDNN_FUZZ needs clang; set CMAKE_CXX_COMPILER=clang++")
endif()

add_library(readers STATIC
  ffi/base/bytes.cc
  ffi/base/json_text.cc
  ffi/base/log.cc
  ffi/cudnn/cudnn_library.cc
  ffi/graph/graph_spec.cc
  ffi/graph/node_kinds.cc
  ffi/graph/score_mod.cc
  ffi/graph/shape_rules.cc
  ffi/keeping/plan_file.cc
  ffi/keeping/plan_store.cc
  ffi/plans/plan_record.cc
  ffi/candidates/plan_request.cc)
target_include_directories(readers PUBLIC ffi PRIVATE
  "${CMAKE_CURRENT_BINARY_DIR}/generated")
target_include_directories(readers SYSTEM PRIVATE ${JAX_CUDNN_INCLUDE_DIRS})
target_compile_definitions(readers
  PUBLIC _GLIBCXX_ASSERTIONS
  PRIVATE "JAX_CUDNN_BUILDER=\"fuzz\"")
target_compile_options(readers PUBLIC
  -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Wpedantic
  -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
target_link_libraries(readers PUBLIC ${CMAKE_DL_LIBS})

foreach(target IN ITEMS json graph score_mod request plan_file store)
  add_executable(${target} tests/fuzz/${target}.cc)
  target_link_libraries(${target} PRIVATE readers)
  target_link_options(${target} PRIVATE -fsanitize=fuzzer,address,undefined)
endforeach()
