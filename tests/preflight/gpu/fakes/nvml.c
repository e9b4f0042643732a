/* libnvidia-ml.so.1, played, for NVIDIA's own bindings: one H200 of a driver that has no recovery action yet.
   Signatures, numbers and structures are those of nvml.h; what is not here is "Function Not Found". */

#include <stdio.h>
#include <string.h>

typedef void *Device;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, INVALID = 2, NOT_FOUND = 6, TIMED_OUT = 10 };

struct Pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
struct Memory { unsigned version; unsigned long long total, reserved, free, used; };
struct Fabric { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; };
struct Sram { unsigned version; unsigned long long counts[11]; unsigned is_exceeded; };
struct Histogram { unsigned max, high, partial, low, none; };
struct Event { Device device; unsigned long long type, data; unsigned instance, compute; };
struct Field {
  unsigned id, scope; long long stamp, latency; unsigned type, result;
  union { double d; unsigned ui; unsigned long ul; unsigned long long ull; } value;
};

static int card, n_events;

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "550.54.15"), SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) { return *device = &card, SUCCESS; }
int nvmlDeviceGetName(Device d, char *text, unsigned size) { return snprintf(text, size, "NVIDIA H200"), SUCCESS; }
int nvmlDeviceGetUUID(Device d, char *text, unsigned size) { return snprintf(text, size, "GPU-11aa"), SUCCESS; }
int nvmlDeviceGetPciInfo_v3(Device d, struct Pci *pci) {
  return snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:9B:00.0"), SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Device d, unsigned kind, unsigned counter, unsigned long long *count) {
  return *count = 100 + 10 * kind + counter, SUCCESS;
}
int nvmlDeviceGetRemappedRows(Device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  return *corrected = 1, *uncorrected = 2, *pending = 1, *failed = 0, SUCCESS;
}
int nvmlDeviceGetRowRemapperHistogram(Device d, struct Histogram *banks) {
  return banks->max = 3070, banks->none = 2, SUCCESS;
}
int nvmlDeviceGetSramEccErrorStatus(Device d, struct Sram *errors) {
  if (errors->version != (sizeof *errors | 1u << 24)) return INVALID;
  return errors->is_exceeded = 1, SUCCESS;
}
int nvmlDeviceGetRetiredPagesPendingStatus(Device d, unsigned *pending) { return NOT_SUPPORTED; }
int nvmlDeviceGetMaxMigDeviceCount(Device d, unsigned *count) { return *count = 7, SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device d, unsigned at, Device *part) {
  return *part = d, at == 2 ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetMemoryInfo_v2(Device d, struct Memory *memory) {
  if (memory->version != (sizeof *memory | 2u << 24)) return INVALID;
  return memory->total = 150754820096ULL, memory->used = 4194304, SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device d, unsigned long long *reasons) { return *reasons = 4, SUCCESS; }
int nvmlDeviceGetCurrPcieLinkGeneration(Device d, unsigned *gen) { return *gen = 5, SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device d, unsigned *gen) { return *gen = 5, SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(Device d, unsigned *width) { return *width = 8, SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(Device d, unsigned *width) { return *width = 16, SUCCESS; }
int nvmlDeviceGetPowerManagementLimit(Device d, unsigned *milliwatts) { return *milliwatts = 500000, SUCCESS; }
int nvmlDeviceGetPowerManagementDefaultLimit(Device d, unsigned *milliwatts) {
  return *milliwatts = 700000, SUCCESS;
}
int nvmlDeviceGetNvLinkState(Device d, unsigned link, unsigned *up) {
  return link < 18 ? (*up = link != 17, SUCCESS) : INVALID;
}
int nvmlDeviceGetFieldValues(Device d, int count, struct Field *fields) {
  for (int i = 0; i < count; i++) {
    fields[i].result = SUCCESS;
    if (fields[i].id >= 161 && fields[i].id <= 163) fields[i].type = 3, fields[i].value.ull = fields[i].scope == 2;
    else fields[i].result = NOT_SUPPORTED;
  }
  return SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(Device d, struct Fabric *fabric) {
  if (fabric->version != (sizeof *fabric | 2u << 24)) return INVALID;
  fabric->cluster[0] = 0xAB, fabric->clique = 7, fabric->health = 0xAA;
  return fabric->state = 3, fabric->status = 0, SUCCESS;
}
int nvmlEventSetCreate(Device *set) { return *set = &n_events, SUCCESS; }
int nvmlDeviceRegisterEvents(Device d, unsigned long long kinds, Device set) { return n_events = kinds == 8, SUCCESS; }
int nvmlEventSetWait_v2(Device set, struct Event *event, unsigned ms) {
  if (!n_events) return TIMED_OUT;
  n_events--;
  memset(event, 0, sizeof *event);
  return event->device = &card, event->type = 8, event->data = 79, SUCCESS;
}
