// SPDX-License-Identifier: GPL-2.0-only
/*
 * ebb_trackers: trackers of free pages for the driver ebb_balloon that watch
 * the page allocator with tracepoints, and recordings of what they do. Both are
 * for research; the driver does not need them.
 *
 * Lock order: tracker.c's mutex of the driver, then what a tracker has, then
 * ebb_memory_mutex, then a zone's lock. The hooks take no lock.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/math64.h>
#include <linux/memory.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/seq_file.h>
#include <linux/string.h>
#include <linux/tracepoint.h>

#include "hot.h"
#include "record.h"
#include "trackers.h"
#include "zone_map.h"

DEFINE_PER_CPU(struct ebb_hot_counts, ebb_hot);
/* See trackers.h. */
DEFINE_MUTEX(ebb_memory_mutex);

void ebb_hot_reset(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		memset(per_cpu_ptr(&ebb_hot, cpu), 0, sizeof(struct ebb_hot_counts));
}

void ebb_hot_show(struct seq_file *m)
{
	struct ebb_hot_counts sum = { 0 };
	int cpu;

	for_each_possible_cpu(cpu) {
		const struct ebb_hot_counts *hot = per_cpu_ptr(&ebb_hot, cpu);

		sum.frees += READ_ONCE(hot->frees);
		sum.captured += READ_ONCE(hot->captured);
		sum.lost += READ_ONCE(hot->lost);
		sum.samples += READ_ONCE(hot->samples);
		sum.sample_ns += READ_ONCE(hot->sample_ns);
	}
	seq_printf(m, "frees %llu\n", sum.frees);
	seq_printf(m, "captured %llu\n", sum.captured);
	seq_printf(m, "lost %llu\n", sum.lost);
	seq_printf(m, "free_ns %llu\n", div64_u64(sum.sample_ns, max(sum.samples, 1ULL)));
	seq_printf(m, "free_samples %llu\n", sum.samples);
}

struct ebb_tracepoint_search {
	const char *name;
	struct tracepoint *found;
};

static void ebb_tracepoint_compare(struct tracepoint *tp, void *data)
{
	struct ebb_tracepoint_search *search = data;

	if (!strcmp(tp->name, search->name))
		search->found = tp;
}

/* See trackers.h. */
struct tracepoint *ebb_tracepoint_find(const char *name)
{
	struct ebb_tracepoint_search search = { .name = name };

	for_each_kernel_tracepoint(ebb_tracepoint_compare, &search);
	if (!search.found)
		pr_warn("kernel tracepoint %s cannot be found\n", name);
	return search.found;
}

static int ebb_memory_changed(struct notifier_block *unused, unsigned long action, void *data)
{
	const struct memory_notify *range = data;

	mutex_lock(&ebb_memory_mutex);
	if (action == MEM_ONLINE) {
		ebb_bitmap_online();
	} else if (action == MEM_OFFLINE) {
		ebb_percpu_offline(range->start_pfn, range->nr_pages);
		ebb_zone_maps_offline(range->start_pfn, range->nr_pages);
	}
	mutex_unlock(&ebb_memory_mutex);
	return NOTIFY_OK;
}

static struct notifier_block ebb_memory_notifier = {
	.notifier_call = ebb_memory_changed,
};

static const struct ebb_tracker_module ebb_trackers = {
	.percpu = &ebb_tracker_percpu,
	.bitmap = &ebb_tracker_bitmap,
	.changed = ebb_record_tracker,
};

static int __init ebb_trackers_load(void)
{
	int err;

	err = register_memory_notifier(&ebb_memory_notifier);
	if (err)
		return err;
	err = ebb_trackers_register(&ebb_trackers);
	if (err) {
		unregister_memory_notifier(&ebb_memory_notifier);
		return err;
	}
	ebb_recording_file_add();
	return 0;
}

static void __exit ebb_trackers_unload(void)
{
	/* Waits for a writer of the file, which may be about to restart a tracker. */
	ebb_recording_file_remove();
	ebb_trackers_unregister(&ebb_trackers);
	ebb_recording_free();
	unregister_memory_notifier(&ebb_memory_notifier);
}

module_init(ebb_trackers_load);
module_exit(ebb_trackers_unload);

MODULE_DESCRIPTION("trackers of free pages for ebb_balloon, and recordings of them");
MODULE_LICENSE("GPL");
