#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace cgx {
namespace {

constexpr char kFolder[] = "/dev/shm/";
constexpr char kPrefix[] = "cgx-";
constexpr char kDigits[] = "0123456789abcdef";
constexpr size_t kRandomNbytes = 16;

std::string failure(const std::string& what, int error) { return what + ": " + std::strerror(error); }

std::string random_name(std::string* name) {
  uint8_t bytes[kRandomNbytes];
  if (getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) return failure("no random bytes", errno);
  *name = kPrefix;
  for (uint8_t byte : bytes) {
    name->push_back(kDigits[byte >> 4]);
    name->push_back(kDigits[byte & 15]);
  }
  return "";
}

// Names come from a peer: only ours are opened, and none that leaves the folder.
bool well_formed(const std::string& name) {
  const size_t prefix = sizeof kPrefix - 1;
  return name.size() == prefix + 2 * kRandomNbytes && name.compare(0, prefix, kPrefix) == 0 &&
         name.find_first_not_of(kDigits, prefix) == std::string::npos;
}

// What is wrong with an open file that ought to be a segment of ours; empty: nothing.
std::string objection(int file, int64_t nbytes) {
  struct stat facts;
  if (fstat(file, &facts) != 0) return failure("cannot look at the peers' shared memory", errno);
  if (!S_ISREG(facts.st_mode)) return "the peers' shared memory is no regular file";
  if (facts.st_uid != geteuid())
    return "the peers' shared memory belongs to user " + std::to_string(facts.st_uid) +
           ", not to this process's user, " + std::to_string(geteuid());
  if ((facts.st_mode & 07777) != 0600) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(facts.st_mode & 07777));
    return "the peers' shared memory has mode " + std::string(mode) + ", not 0600: others may have touched it";
  }
  if (facts.st_size != nbytes)
    return "the peers' shared memory has " + std::to_string(facts.st_size) + " bytes, not " + std::to_string(nbytes);
  return "";
}

std::string map(int file, int64_t nbytes, uint8_t** data) {
  void* mapped = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED)
    return failure("cannot map shared memory (free some memory there, then restart all ranks)", errno);
  *data = static_cast<uint8_t*>(mapped);
  return "";
}

}  // namespace

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
  }
  return *this;
}

void Segment::unmap() {
  if (data_) munmap(data_, static_cast<size_t>(nbytes_));
  data_ = nullptr;
  nbytes_ = 0;
}

std::string Segment::create(int64_t nbytes, Segment* out, std::string* name) {
  std::string error = random_name(name);
  if (!error.empty()) return error;
  const std::string path = kFolder + *name;
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return failure("cannot create a file in /dev/shm", errno);
  int full;
  do {
    full = posix_fallocate(file, 0, nbytes);
  } while (full == EINTR);
  if (full != 0)
    error = failure("cannot get " + std::to_string(nbytes >> 20) + " MB in /dev/shm", full) +
            " (make it larger, e.g. docker run --shm-size=1g)";
  uint8_t* data = nullptr;
  if (error.empty()) error = map(file, nbytes, &data);
  ::close(file);
  if (!error.empty()) {
    ::unlink(path.c_str());
    return error;
  }
  out->unmap();
  out->data_ = data;
  out->nbytes_ = nbytes;
  return "";
}

std::string Segment::open(const std::string& name, int64_t nbytes, Segment* out) {
  if (!well_formed(name)) return "a peer named a shared segment that is none of ours";
  const std::string path = kFolder + name;
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return failure("cannot open the peers' shared memory", errno);
  std::string error = objection(file, nbytes);
  uint8_t* data = nullptr;
  if (error.empty()) error = map(file, nbytes, &data);
  ::close(file);
  if (!error.empty()) return error;
  out->unmap();
  out->data_ = data;
  out->nbytes_ = nbytes;
  return "";
}

std::string Segment::make_private(int64_t nbytes, Segment* out) {
  void* found = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED)
    return failure("cannot get " + std::to_string(nbytes) + " bytes of memory (free some, then restart all ranks)",
                   errno);
  Segment made;
  made.data_ = static_cast<uint8_t*>(found);
  made.nbytes_ = nbytes;
  *out = std::move(made);
  return "";
}

void Segment::unlink(const std::string& name) {
  if (well_formed(name)) ::unlink((kFolder + name).c_str());
}

}  // namespace cgx
