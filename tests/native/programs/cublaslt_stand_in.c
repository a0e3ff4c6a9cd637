// SPDX-License-Identifier: Apache-2.0
// A libcublasLt that plans and launches nothing: it lists three algorithms, and writes
// what a launch is given into the file that CUBLASLT_LOG names.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { uint64_t data[8]; } Algorithm;
typedef struct {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} Found;
typedef struct { char set[64][16]; size_t sizes[64]; } Description;
// Of groups, the sizes are addresses.
typedef struct { int type; uint64_t rows, columns; int64_t leading; } Layout;

long cublasLtGetVersion(void) { return 990102; }
const char* cublasLtGetStatusString(int status) {
  return status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_?";
}
int cublasLtCreate(void** handle) { *handle = malloc(1); return 0; }
int cublasLtMatmulDescCreate(Description** made, int compute, int scale) {
  *made = calloc(1, sizeof(Description));
  return 0;
}
int cublasLtMatmulDescDestroy(Description* made) { free(made); return 0; }
int cublasLtMatmulDescSetAttribute(Description* made, int name, const void* value,
                                   size_t size) {
  memcpy(made->set[name], value, size);
  made->sizes[name] = size;
  return 0;
}
int cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows,
                               uint64_t columns, int64_t leading) {
  *made = malloc(sizeof(Layout));
  **made = (Layout){type, rows, columns, leading};
  return 0;
}
int cublasLtGroupedMatrixLayoutCreate(Layout** made, int type, int groups,
                                      const void* rows, const void* columns,
                                      const void* leading) {
  *made = malloc(sizeof(Layout));
  **made = (Layout){type, (uint64_t)rows, (uint64_t)columns, (int64_t)leading};
  return 0;
}
int cublasLtMatrixLayoutDestroy(Layout* made) { free(made); return 0; }
int cublasLtMatrixLayoutSetAttribute(void) { return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { *made = malloc(1); return 0; }
int cublasLtMatmulPreferenceDestroy(void* made) { free(made); return 0; }
int cublasLtMatmulPreferenceSetAttribute(void) { return 0; }

// Of the three, the second and third have the same configuration.
int cublasLtMatmulAlgoGetHeuristic(void* handle, Description* product, Layout* a,
                                   Layout* b, Layout* c, Layout* d, void* preference,
                                   int wanted, Found* found, int* count) {
  if (a->leading % 8 != 0) return 15;
  for (*count = 0; *count < 4 && *count < wanted; ++*count) {
    memset(&found[*count], 0, sizeof(Found));
    found[*count].algorithm.data[0] = *count < 2 ? *count : 2;
    found[*count].workspace = 256u * *count;
  }
  return 0;
}
int cublasLtMatmulAlgoCheck(void* handle, Description* product, Layout* a, Layout* b,
                            Layout* c, Layout* d, const Algorithm* algorithm,
                            Found* found) {
  found->algorithm = *algorithm;
  found->workspace = 256u * algorithm->data[0];
  return algorithm->data[0] > 2 ? 15 : 0;
}
int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int name,
                                         void* value, size_t size, size_t* written) {
  int32_t number = name == 1 ? 20 + (int)algorithm->data[0] : name == 8 ? 3 : 0;
  memcpy(value, &number, size);
  *written = size;
  return 0;
}

// Numbers in the order in which tests/native/test_cublaslt.py reads them.
int cublasLtMatmul(void* handle, Description* product, const float* alpha,
                   const void* a, Layout* at, const void* b, Layout* bt,
                   const float* beta, const void* c, Layout* ct, void* d, Layout* dt,
                   const Algorithm* algorithm, void* workspace, size_t size,
                   void* stream) {
  FILE* log = fopen(getenv("CUBLASLT_LOG"), "a");
  int32_t transposes[2];
  uint32_t epilogue;
  int64_t leading;
  memcpy(&transposes[0], product->set[3], 4);
  memcpy(&transposes[1], product->set[4], 4);
  memcpy(&epilogue, product->set[7], 4);
  memcpy(&leading, product->set[12], 8);
  fprintf(log, "%d %d %u %ld %g %g", transposes[0], transposes[1], epilogue,
          (long)leading, *alpha, *beta);
  const Layout* every[] = {at, bt, ct, dt};
  for (int i = 0; i < 4; ++i) {
    fprintf(log, " %d %lu %lu %ld", every[i]->type, (unsigned long)every[i]->rows,
            (unsigned long)every[i]->columns, (long)every[i]->leading);
  }
  fprintf(log, " %lu %lu\n", (unsigned long)algorithm->data[0], (unsigned long)size);
  fclose(log);
  return 0;
}
