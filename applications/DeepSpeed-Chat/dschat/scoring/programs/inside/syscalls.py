# SPDX-License-Identifier: Apache-2.0
"""System calls that an ordinary Python program makes; everything else is refused.

None of them starts a process, opens a socket, changes a file's owner, mode or times, mounts, traces or sets the clock.
"""

# Name, number on x86_64, number on aarch64 (- where it does not exist).
CALLS = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  open 2 -  openat 257 56  close 3 57
close_range 436 436  lseek 8 62  stat 4 -  fstat 5 80  lstat 6 -  newfstatat 262 79  statx 332 291  access 21 -
faccessat 269 48  faccessat2 439 439  mmap 9 222  mprotect 10 226  munmap 11 215  mremap 25 216  madvise 28 233
brk 12 214  membarrier 324 283  msync 26 227  rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139
rt_sigtimedwait 128 137  rt_sigpending 127 136  rt_sigsuspend 130 133  sigaltstack 131 132  pause 34 -  alarm 37 -
setitimer 38 103  getitimer 36 102  poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create1 291 20
epoll_ctl 233 21  epoll_wait 232 -  epoll_pwait 281 22  pipe 22 -  pipe2 293 59  dup 32 23  dup2 33 -  dup3 292 24
fcntl 72 25  flock 73 32  sched_yield 24 124  sched_getaffinity 204 123  nanosleep 35 101  clock_nanosleep 230 115
clock_gettime 228 113  clock_getres 229 114  gettimeofday 96 169  time 201 -  times 100 153  getpid 39 172
getppid 110 173  gettid 186 178  getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177  getgroups 115 158
uname 63 160  sysinfo 99 179  getrusage 98 165  getrlimit 97 163  getcpu 309 168  exit 60 93
exit_group 231 94  futex 202 98  set_robust_list 273 99  set_tid_address 218 96  rseq 334 293  arch_prctl 158 -
getrandom 318 278  restart_syscall 219 128  getcwd 79 17  chdir 80 49  fchdir 81 50  getdents64 217 61
mkdir 83 -  mkdirat 258 34  rmdir 84 -  unlink 87 -  unlinkat 263 35  rename 82 -  renameat 264 38  renameat2 316 276
readlink 89 -  readlinkat 267 78  ftruncate 77 46  truncate 76 45
fallocate 285 47  fsync 74 82  fdatasync 75 83  umask 95 166  fadvise64 221 223  sendfile 40 71
copy_file_range 326 285  statfs 137 43  fstatfs 138 44
"""
WORDS = CALLS.split()
X86_64 = {int(number) for number in WORDS[1::3]}
AARCH64 = {int(number) for number in WORDS[2::3] if number != "-"}
# Machine → the code that the kernel checks (AUDIT_ARCH), the allowed calls, the numbers of clone, clone3, prlimit64,
# tgkill.
TABLES = {
    "x86_64": (0xC000003E, X86_64, 56, 435, 302, 234),
    "aarch64": (0xC00000B7, AARCH64, 220, 435, 261, 131),
}
