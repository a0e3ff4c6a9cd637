// SPDX-License-Identifier: Apache-2.0
// A profiler in miniature: writes the NVTX ranges of a process to the file $NVTX_RANGES.
//
// NVTX loads it from NVTX_INJECTION64_PATH. The numbers and offsets are those of
// nvtxDetail/nvtxTypes.h and nvToolsExt.h of NVTX 3, which promises to keep them.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
struct Callbacks {
  size_t size;
  int (*get_module_table)(int module, Function*** table, unsigned* count);
};

enum { kCallbacks = 1, kCore2 = 5, kPush = 4, kPop = 5, kCreateDomain = 12 };
// In nvtxEventAttributes_v2.
enum { kMessageType = 32, kMessage = 40, kAscii = 1 };

static FILE* out;

static void* CreateDomain(const char* name) { return strdup(name); }

static int Push(void* domain, const char* attributes) {
  int type;
  const char* message;
  memcpy(&type, attributes + kMessageType, sizeof type);
  memcpy(&message, attributes + kMessage, sizeof message);
  if (domain != NULL && type == kAscii) {
    fprintf(out, "push %s %s\n", (const char*)domain, message);
    fflush(out);
  }
  return 0;
}

static int Pop(void* domain) {
  if (domain != NULL) {
    fprintf(out, "pop %s\n", (const char*)domain);
    fflush(out);
  }
  return 0;
}

int InitializeInjectionNvtx2(const void* (*get_table)(unsigned)) {
  const struct Callbacks* callbacks = get_table(kCallbacks);
  Function** table;
  unsigned count;
  if (out == NULL) out = fopen(getenv("NVTX_RANGES"), "a");
  if (out == NULL || callbacks == NULL) return 0;
  if (!callbacks->get_module_table(kCore2, &table, &count)) return 0;
  *table[kPush] = (Function)Push;
  *table[kPop] = (Function)Pop;
  *table[kCreateDomain] = (Function)CreateDomain;
  return 1;
}
