/* Counts the calls of a process that concern one folder, and lets one of them fail, end the process or get a signal.

   Preloaded (LD_PRELOAD), so it sees what Python, Rust and C++ libraries call of the C library. What the C library
   calls by itself, as inside fwrite, it does not see; fopen it does. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = -1, SIGNAL = -1000 }; /* actions: an errno, KILL, or SIGNAL less a number; 0 for counting alone */

static char folder[PATH_MAX];
static size_t folder_len;
static int place, action, record = -1;
static atomic_int count;
static _Thread_local int busy;

/* From now on count calls below `root`, a path without links; at the `at`-th do `what`; write all names to `log`. */
void faults_arm(const char *root, int at, int what, int log) {
    folder_len = strlen(root);
    memcpy(folder, root, folder_len + 1);
    place = at, action = what, record = log;
    atomic_store(&count, 0);
}

/* Count no longer; returns how many calls there were. */
int faults_disarm(void) {
    folder_len = 0;
    return atomic_load(&count);
}

static int below(const char *path, size_t length) {
    return length >= folder_len && !memcmp(path, folder, folder_len) && (length == folder_len || path[folder_len] == '/');
}

static ssize_t path_of(int fd, char *found) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return syscall(SYS_readlink, link, found, PATH_MAX);
}

static int concerns(int fd, const char *path) {
    char found[PATH_MAX];
    ssize_t length;
    if (path && path[0] == '/')
        return below(path, strlen(path));
    if (fd == AT_FDCWD)
        length = syscall(SYS_readlink, "/proc/self/cwd", found, PATH_MAX);
    else
        length = path_of(fd, found);
    return length > 0 && below(found, length);
}

/* Says whether a call is to fail, with errno set; `half` writes half of what it was to write, before an end. */
static int fails(const char *name, int fd, const char *path, void (*half)(void *), void *data) {
    if (!folder_len || busy)
        return 0;
    int before = errno, is_ours;
    busy = 1;
    is_ours = concerns(fd, path);
    if (is_ours) {
        int number = atomic_fetch_add(&count, 1) + 1;
        if (record >= 0) {
            char line[64];
            int length = snprintf(line, sizeof line, "%s\n", name);
            syscall(SYS_write, record, line, length);
        }
        if (number == place && action) {
            if (action == KILL) {
                if (half)
                    half(data);
                syscall(SYS_kill, getpid(), SIGKILL);
                for (;;)
                    pause();
            }
            if (action <= SIGNAL) {
                syscall(SYS_kill, getpid(), SIGNAL - action);
            } else {
                busy = 0;
                errno = action;
                return 1;
            }
        }
    }
    busy = 0;
    errno = before;
    return 0;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* A function whose arguments say which file it is about; `...` is the call to the real one. */
#define WRAP(type, name, fd, path, failure, arguments, call) \
    type name arguments { \
        REAL(name); \
        return fails(#name, fd, path, NULL, NULL) ? failure : real call; \
    }

#define OPEN(name, fd, parameters, call, call_mode) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if (fails(flags & O_CREAT ? #name " to create" : #name, fd, path, NULL, NULL)) \
            return -1; \
        return (flags & (O_CREAT | O_TMPFILE)) ? real call_mode : real call; \
    }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags), (path, flags, mode))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags), (path, flags, mode))
OPEN(openat, fd, (int fd, const char *path, int flags, ...), (fd, path, flags), (fd, path, flags, mode))
OPEN(openat64, fd, (int fd, const char *path, int flags, ...), (fd, path, flags), (fd, path, flags, mode))
WRAP(FILE *, fopen, AT_FDCWD, path, NULL, (const char *path, const char *mode), (path, mode))
WRAP(FILE *, fopen64, AT_FDCWD, path, NULL, (const char *path, const char *mode), (path, mode))
WRAP(DIR *, opendir, AT_FDCWD, path, NULL, (const char *path), (path))
WRAP(DIR *, fdopendir, fd, NULL, NULL, (int fd), (fd))

WRAP(int, stat, AT_FDCWD, path, -1, (const char *path, struct stat *found), (path, found))
WRAP(int, lstat, AT_FDCWD, path, -1, (const char *path, struct stat *found), (path, found))
WRAP(int, fstat, fd, NULL, -1, (int fd, struct stat *found), (fd, found))
WRAP(int, fstatat, fd, path, -1, (int fd, const char *path, struct stat *found, int flags), (fd, path, found, flags))
WRAP(int, stat64, AT_FDCWD, path, -1, (const char *path, struct stat64 *found), (path, found))
WRAP(int, lstat64, AT_FDCWD, path, -1, (const char *path, struct stat64 *found), (path, found))
WRAP(int, fstat64, fd, NULL, -1, (int fd, struct stat64 *found), (fd, found))
WRAP(int, fstatat64, fd, path, -1, (int fd, const char *path, struct stat64 *found, int flags), (fd, path, found, flags))
WRAP(int, statx, fd, path, -1, (int fd, const char *path, int flags, unsigned int mask, struct statx *found),
     (fd, path, flags, mask, found))
WRAP(int, access, AT_FDCWD, path, -1, (const char *path, int mode), (path, mode))
WRAP(int, faccessat, fd, path, -1, (int fd, const char *path, int mode, int flags), (fd, path, mode, flags))
WRAP(ssize_t, readlink, AT_FDCWD, path, -1, (const char *path, char *found, size_t size), (path, found, size))
WRAP(ssize_t, readlinkat, fd, path, -1, (int fd, const char *path, char *found, size_t size), (fd, path, found, size))

WRAP(ssize_t, read, fd, NULL, -1, (int fd, void *data, size_t size), (fd, data, size))
WRAP(ssize_t, pread, fd, NULL, -1, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
WRAP(ssize_t, pread64, fd, NULL, -1, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
WRAP(void *, mmap, fd, NULL, MAP_FAILED, (void *place, size_t size, int may, int flags, int fd, off_t at),
     (place, size, may, flags, fd, at))
WRAP(void *, mmap64, fd, NULL, MAP_FAILED, (void *place, size_t size, int may, int flags, int fd, off64_t at),
     (place, size, may, flags, fd, at))

struct written {
    int fd;
    const void *data;
    size_t size;
};

static void write_half(void *given) {
    struct written *call = given;
    syscall(SYS_write, call->fd, call->data, call->size / 2);
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    struct written call = {fd, data, size};
    return fails("write", fd, NULL, write_half, &call) ? -1 : real(fd, data, size);
}

WRAP(ssize_t, pwrite, fd, NULL, -1, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRAP(ssize_t, pwrite64, fd, NULL, -1, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRAP(ssize_t, writev, fd, NULL, -1, (int fd, const struct iovec *parts, int number), (fd, parts, number))
WRAP(ssize_t, sendfile, to, NULL, -1, (int to, int from, off_t *at, size_t size), (to, from, at, size))
WRAP(ssize_t, sendfile64, to, NULL, -1, (int to, int from, off64_t *at, size_t size), (to, from, at, size))
WRAP(ssize_t, copy_file_range, to, NULL, -1,
     (int from, off64_t *at, int to, off64_t *place, size_t size, unsigned int flags), (from, at, to, place, size, flags))

WRAP(int, ftruncate, fd, NULL, -1, (int fd, off_t size), (fd, size))
WRAP(int, ftruncate64, fd, NULL, -1, (int fd, off64_t size), (fd, size))
WRAP(int, truncate, AT_FDCWD, path, -1, (const char *path, off_t size), (path, size))
WRAP(int, truncate64, AT_FDCWD, path, -1, (const char *path, off64_t size), (path, size))
WRAP(int, fallocate, fd, NULL, -1, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
WRAP(int, fsync, fd, NULL, -1, (int fd), (fd))
WRAP(int, fdatasync, fd, NULL, -1, (int fd), (fd))
WRAP(int, flock, fd, NULL, -1, (int fd, int operation), (fd, operation))

WRAP(int, rename, AT_FDCWD, to, -1, (const char *from, const char *to), (from, to))
WRAP(int, renameat, fd, to, -1, (int fd, const char *from, int other, const char *to), (fd, from, other, to))
WRAP(int, link, AT_FDCWD, to, -1, (const char *from, const char *to), (from, to))
WRAP(int, linkat, other, to, -1, (int fd, const char *from, int other, const char *to, int flags),
     (fd, from, other, to, flags))
WRAP(int, symlink, AT_FDCWD, to, -1, (const char *from, const char *to), (from, to))
WRAP(int, symlinkat, fd, to, -1, (const char *from, int fd, const char *to), (from, fd, to))
WRAP(int, unlink, AT_FDCWD, path, -1, (const char *path), (path))
WRAP(int, unlinkat, fd, path, -1, (int fd, const char *path, int flags), (fd, path, flags))
WRAP(int, rmdir, AT_FDCWD, path, -1, (const char *path), (path))
WRAP(int, mkdir, AT_FDCWD, path, -1, (const char *path, mode_t mode), (path, mode))
WRAP(int, mkdirat, fd, path, -1, (int fd, const char *path, mode_t mode), (fd, path, mode))
WRAP(int, chmod, AT_FDCWD, path, -1, (const char *path, mode_t mode), (path, mode))
WRAP(int, fchmod, fd, NULL, -1, (int fd, mode_t mode), (fd, mode))
WRAP(int, fchmodat, fd, path, -1, (int fd, const char *path, mode_t mode, int flags), (fd, path, mode, flags))
WRAP(int, utimensat, fd, path, -1, (int fd, const char *path, const struct timespec times[2], int flags),
     (fd, path, times, flags))
WRAP(int, futimens, fd, NULL, -1, (int fd, const struct timespec times[2]), (fd, times))

/* One that fails has closed the file all the same. */
int close(int fd) {
    REAL(close);
    int failed = fails("close", fd, NULL, NULL, NULL), cause = errno, done = real(fd);
    if (failed)
        errno = cause;
    return failed ? -1 : done;
}
