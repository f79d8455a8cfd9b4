/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The interfaces between the files of this module.
 */
#ifndef EBB_TRACKERS_H
#define EBB_TRACKERS_H

#include <linux/mutex.h>

#include "tracker.h"

struct tracepoint;

/*
 * Held while a tracker looks at page frames that it wrote down some time ago:
 * memory that is taken offline meanwhile stays until then. Not held while
 * waiting for the host.
 */
extern struct mutex ebb_memory_mutex;

/**
 * ebb_tracepoint_find() - look up a tracepoint of the kernel itself
 * @name: its name, without the subsystem
 *
 * May sleep. Return: the tracepoint, or NULL after a line in the log.
 */
struct tracepoint *ebb_tracepoint_find(const char *name);

/* percpu.c */
extern const struct ebb_tracker_ops ebb_tracker_percpu;
/* Entries of the array of a CPU. */
unsigned int ebb_percpu_entries(void);
/*
 * Memory has left; its page frames are forgotten, their struct pages go next.
 * These run under ebb_memory_mutex, whether or not the tracker runs.
 */
void ebb_percpu_offline(unsigned long pfn, unsigned long pages);

/* bitmap.c */
extern const struct ebb_tracker_ops ebb_tracker_bitmap;
/* Memory was added to a zone. */
void ebb_bitmap_online(void);

#endif
