// The only process of a machine that .ci/avx512-under-bochs emulates: runs the native tests with the serial port as
// their terminal, says how they ended, and switches the machine off.
#include <fcntl.h>
#include <sys/io.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstdio>

int main() {
  mknod("/serial", S_IFCHR | 0600, makedev(4, 64));
  const int serial = open("/serial", O_RDWR);
  for (int standard = 0; standard < 3; ++standard) dup2(serial, standard);
  const pid_t child = fork();
  if (child == 0) {
    execl("/kernels_test", "/kernels_test", "--quick", "--without-float16", static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  printf("exit code %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  fflush(stdout);
  tcdrain(serial);
  // The word to this port ends the emulator.
  if (ioperm(0x8900, 1, 1) == 0)
    for (const char* p = "Shutdown"; *p; ++p) outb(static_cast<unsigned char>(*p), 0x8900);
  for (;;) pause();
}
