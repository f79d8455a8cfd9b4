// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
/*
 * A library that QEMU is started with (LD_PRELOAD): its monotonic clock, which its virtual clock
 * follows, runs slower by the factor in EBB_CLOCK_DIVISOR.
 *
 * All timers of an emulated machine follow the virtual clock. The kernel's tick interrupts a guest
 * 250 times a second of that clock, and each interruption costs an emulated processor more than
 * most guests do in between. With a slower clock there is more work between two of them.
 *
 * The time stamp counter keeps its frequency, and so seems faster: the kernel measures it when it
 * boots. A thread that waits for a condition with a limit gives up at once; QEMU's worker threads
 * do that when they are idle, and then end.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000LL

static int (*system_clock)(clockid_t, struct timespec *);
static long long begin_ns;
static long long divisor = 1;

static long long to_ns(const struct timespec *time)
{
	return time->tv_sec * NS + time->tv_nsec;
}

static struct timespec from_ns(long long ns)
{
	return (struct timespec){ .tv_sec = ns / NS, .tv_nsec = ns % NS };
}

__attribute__((constructor)) static void begin(void)
{
	const char *text = getenv("EBB_CLOCK_DIVISOR");
	struct timespec now;

	*(void **)&system_clock = dlsym(RTLD_NEXT, "clock_gettime");
	if (!system_clock || !text || system_clock(CLOCK_MONOTONIC, &now))
		return;
	begin_ns = to_ns(&now);
	divisor = atoll(text) > 1 ? atoll(text) : 1;
}

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *time)
{
	/* Other libraries may ask before this one has begun. */
	int result = system_clock ? system_clock(clock, time) :
				    syscall(SYS_clock_gettime, clock, time);

	if (!result && clock == CLOCK_MONOTONIC)
		*time = from_ns(begin_ns + (to_ns(time) - begin_ns) / divisor);
	return result;
}

/* QEMU waits for its next timer here. It may wait too short a time, but not forever. */
__attribute__((visibility("default"))) int ppoll(struct pollfd *files, nfds_t count,
						 const struct timespec *limit, const sigset_t *mask)
{
	struct timespec longer;

	/* The system call writes what remains of the time. */
	if (limit) {
		longer = limit->tv_sec < INT_MAX / divisor ? from_ns(to_ns(limit) * divisor) :
							      *limit;
		limit = &longer;
	}
	return syscall(SYS_ppoll, files, count, limit, mask, _NSIG / 8);
}
