// A file in /dev/shm mapped into this process: created with an unguessable name, opened by name, soon nameless.
#pragma once

#include <cstdint>
#include <string>

namespace cgx {

class Segment {
 public:
  Segment() = default;
  ~Segment() { unmap(); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  Segment(Segment&& other) noexcept { *this = static_cast<Segment&&>(other); }
  Segment& operator=(Segment&& other) noexcept;

  // Both return an empty string, or a sentence that says what went wrong.
  // A new file is really allocated, so that a full /dev/shm is an error here and not a SIGBUS later.
  static std::string create(int64_t nbytes, Segment* out, std::string* name);
  // Refuses a name that is none of ours, and a file of another user, mode or length.
  static std::string open(const std::string& name, int64_t nbytes, Segment* out);
  static void unlink(const std::string& name);
  // Memory of this process alone, all zeros.
  static std::string make_private(int64_t nbytes, Segment* out);

  // Leaves the memory to somebody who may still use it.
  void leak() { data_ = nullptr, nbytes_ = 0; }

  uint8_t* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  void unmap();
  uint8_t* data_ = nullptr;
  int64_t nbytes_ = 0;
};

}  // namespace cgx
