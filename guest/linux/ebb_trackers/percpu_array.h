/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The arrays of tracker "percpu": what the hook writes and the threads take.
 */
#ifndef EBB_TRACKERS_PERCPU_ARRAY_H
#define EBB_TRACKERS_PERCPU_ARRAY_H

#include <linux/irq_work.h>
#include <linux/percpu.h>
#include <linux/types.h>

#include "isolate.h"

struct page;
struct task_struct;

/**
 * struct ebb_array - freed pages of one CPU
 * @used: number of @entries
 * @full: the thread has to take @entries before there is room again
 * @due: the thread has to take @entries, whether there is room or not
 * @last: the last entry, while it is sure to be in @entries and stands for its
 *	block; else EBB_NO_PFN
 * @entries: page frame numbers. These five are changed by their own CPU with
 *	interrupts off.
 * @taken_count: number of @taken
 * @taken: what the thread has taken. These two are under ebb_memory_mutex.
 * @wake: wakes the thread, which the hook cannot do under whatever lock it is
 * @batch: the second array of v8: blocks that are out of the allocator
 */
struct ebb_array {
	unsigned int used;
	bool full;
	bool due;
	unsigned long last;
	unsigned long *entries;
	unsigned int taken_count;
	unsigned long *taken;
	struct irq_work wake;
	struct ebb_batch batch;
};

DECLARE_PER_CPU(struct ebb_array, ebb_arrays);
/* The threads, which smpboot starts. */
DECLARE_PER_CPU(struct task_struct *, ebb_percpu_thread);

/* Parameters, and entries that a scan has dropped. */
extern unsigned int percpu_order;
extern atomic64_t ebb_percpu_dropped;

/* Return: 0 or -ENOMEM. */
int ebb_arrays_alloc(void);

/* When neither the hook nor a thread runs. */
void ebb_arrays_free(void);

/* The hook, of the tracepoint mm_page_free. */
void ebb_percpu_freed(void *unused, struct page *page, unsigned int order);

/* The thread takes what the hook has written, and leaves it an empty array. */
void ebb_array_take(struct ebb_array *array);

/* Hands over all arrays that are not empty, and they are written on until their turn. Sleeps. */
void ebb_arrays_flush(void);

#endif
