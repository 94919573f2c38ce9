# SPDX-License-Identifier: Apache-2.0
"""The code that runs inside the sandbox before the program, with the standard library alone, in a separate process.

What protects the machine, all set up before a line of the program runs:

- Namespaces (`namespaces`, or bubblewrap): no network, no other processes, and a root folder with the interpreter and
  the system's libraries, and an empty working folder, all read-only: there is no limit on files, because a program
  can write none.
- Resource limits (`confine.limit_resources`): processor time, memory, no bytes written to files, open files; and
  threads, in a user namespace from Linux 5.14 on.
- No capabilities, and no way to gain any (`confine.drop_capabilities`).
- Landlock (`confine.restrict_files`), if the kernel has it: reading the interpreter, writing nothing but devices.
- seccomp (`confine.restrict_calls`), if the kernel has it, on x86_64 and aarch64: a list of permitted system calls,
  none of which starts a process, opens a socket, locks a file, signals others, mounts, traces or sets the clock.

What this does not stop: bugs of the kernel in the permitted system calls; a program that uses all of its limits;
forged texts of exceptions, from which the parent draws no conclusions; more threads than the limit, if the trainer is
root and cannot give the program a user of its own. Level rlimits has no namespaces and protects from accidents alone:
on a kernel without Landlock and seccomp, a program can read the user's files, use the network and start processes.
"""
