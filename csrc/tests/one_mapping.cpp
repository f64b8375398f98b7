// Stands in for segment/segment.cpp where all ranks are threads of one process: a segment is one piece of memory, at
// the same address for all, so that ThreadSanitizer sees what they share.
#include <cstdlib>
#include <map>
#include <mutex>

#include "segment/segment.h"

namespace cgx {
namespace {

struct Memory {
  int64_t nbytes;
  int users;  // mappings, and its name
};
std::mutex mutex;
std::map<std::string, uint8_t*> names;
std::map<uint8_t*, Memory> memories;

void let_go(uint8_t* data) {
  if (--memories[data].users > 0) return;
  memories.erase(data);
  std::free(data);
}

}  // namespace

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    unmap();
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
  }
  return *this;
}

void Segment::unmap() {
  if (!data_) return;
  std::lock_guard<std::mutex> lock(mutex);
  let_go(data_);
  data_ = nullptr;
  nbytes_ = 0;
}

std::string Segment::create(int64_t nbytes, Segment* out, std::string* name) {
  out->unmap();
  std::lock_guard<std::mutex> lock(mutex);
  static int made = 0;
  const std::string digits = std::to_string(++made);
  *name = "cgx-" + std::string(32 - digits.size(), '0') + digits;
  out->nbytes_ = nbytes;
  out->data_ = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>((nbytes + 63) / 64 * 64)));
  for (int64_t i = 0; i < nbytes; ++i) out->data_[i] = 0;
  names[*name] = out->data_;
  memories[out->data_] = {nbytes, 2};
  return "";
}

std::string Segment::open(const std::string& name, int64_t nbytes, Segment* out) {
  out->unmap();
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = names.find(name);
  if (found == names.end()) return "a peer named a shared segment that is none of ours";
  Memory& memory = memories[found->second];
  if (memory.nbytes != nbytes) return "the peers' shared memory has another length";
  ++memory.users;
  out->data_ = found->second;
  out->nbytes_ = nbytes;
  return "";
}

std::string Segment::make_private(int64_t nbytes, Segment* out) {
  std::string name;
  const std::string error = create(nbytes, out, &name);
  unlink(name);
  return error;
}

void Segment::unlink(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = names.find(name);
  if (found == names.end()) return;
  let_go(found->second);
  names.erase(found);
}

}  // namespace cgx
