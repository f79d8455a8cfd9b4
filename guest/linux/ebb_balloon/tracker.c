// SPDX-License-Identifier: GPL-2.0-only
/*
 * Choosing a tracker, switching at run time, common counters, memory hotplug.
 *
 * Lock order: ebb_tracker_mutex, then what a tracker has, then ebb_memory_mutex,
 * then a zone's lock. The hooks take no lock.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/math64.h>
#include <linux/memory.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/string.h>
#include <linux/tracepoint.h>

#include "counts.h"
#include "record.h"
#include "tracker.h"

DEFINE_PER_CPU(struct ebb_hot_counts, ebb_hot);
struct ebb_counts ebb_counts;
/* See tracker.h. */
DEFINE_MUTEX(ebb_memory_mutex);

static const struct ebb_tracker_ops ebb_tracker_none = {
	.name = "none",
};

static const struct ebb_tracker_ops *const ebb_tracker_list[] = {
	&ebb_tracker_none,
	&ebb_tracker_percpu,
	&ebb_tracker_bitmap,
	&ebb_tracker_reporting,
};

/* Protects the next three. Taken before any other lock of this module. */
static DEFINE_MUTEX(ebb_tracker_mutex);
/* What the parameter says. */
static const struct ebb_tracker_ops *ebb_tracker_chosen = &ebb_tracker_reporting;
/* What runs; NULL while the device is away. "none" runs, too. */
static const struct ebb_tracker_ops *ebb_tracker_running;
/* The device that has the trackers. */
static struct ebb_balloon *ebb_tracker_device;

/* Only ebb_memory_mutex is held in the notifier, so what it needs is here. */
static const struct ebb_tracker_ops *ebb_tracker_memory;

static int ebb_memory_changed(struct notifier_block *unused, unsigned long action, void *data)
{
	const struct memory_notify *range = data;

	mutex_lock(&ebb_memory_mutex);
	if (ebb_tracker_memory) {
		if (action == MEM_ONLINE && ebb_tracker_memory->online)
			ebb_tracker_memory->online(range->start_pfn, range->nr_pages);
		else if (action == MEM_OFFLINE && ebb_tracker_memory->offline)
			ebb_tracker_memory->offline(range->start_pfn, range->nr_pages);
	}
	mutex_unlock(&ebb_memory_mutex);
	return NOTIFY_OK;
}

static struct notifier_block ebb_memory_notifier = {
	.notifier_call = ebb_memory_changed,
};

static void ebb_counts_reset(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		memset(per_cpu_ptr(&ebb_hot, cpu), 0, sizeof(struct ebb_hot_counts));
	atomic64_set(&ebb_counts.isolated_blocks, 0);
	atomic64_set(&ebb_counts.isolated_pages, 0);
	atomic64_set(&ebb_counts.isolated_most, 0);
	atomic64_set(&ebb_counts.reported_blocks, 0);
	atomic64_set(&ebb_counts.reported_pages, 0);
	atomic64_set(&ebb_counts.false_isolations, 0);
	atomic64_set(&ebb_counts.low_memory, 0);
	atomic64_set(&ebb_counts.passes, 0);
	atomic64_set(&ebb_counts.report_errors, 0);
}

static void ebb_tracker_memory_set(const struct ebb_tracker_ops *ops)
{
	mutex_lock(&ebb_memory_mutex);
	ebb_tracker_memory = ops;
	mutex_unlock(&ebb_memory_mutex);
}

static void ebb_record_tracker(enum ebb_event event, const struct ebb_tracker_ops *ops)
{
	unsigned int i;

	if (!static_branch_unlikely(&ebb_recording))
		return;
	/* Whatever is freed from here on is seen by the tracker's hooks as well. */
	if (event == EBB_EVENT_STARTED)
		tracepoint_synchronize_unregister();
	for (i = 0; i < ARRAY_SIZE(ebb_tracker_list); i++) {
		if (ebb_tracker_list[i] == ops)
			ebb_record(event, NULL, i, 0);
	}
}

static void ebb_tracker_stop(void)
{
	lockdep_assert_held(&ebb_tracker_mutex);

	if (ebb_tracker_running && ebb_tracker_running->stop) {
		ebb_record_tracker(EBB_EVENT_STOP, ebb_tracker_running);
		ebb_tracker_running->stop();
		ebb_record_tracker(EBB_EVENT_STOPPED, ebb_tracker_running);
		ebb_tracker_memory_set(NULL);
	}
	ebb_tracker_running = NULL;
	/* A report on request may be under way; it has its turn. */
	if (ebb_report_begin(ebb_tracker_device)) {
		WARN(atomic64_read(&ebb_counts.isolated_now), "%lld blocks are still isolated\n",
		     (long long)atomic64_read(&ebb_counts.isolated_now));
		ebb_report_end(ebb_tracker_device);
	}
}

/* Starts what is chosen. Nothing may be running. */
static int ebb_tracker_start(void)
{
	const struct ebb_tracker_ops *ops = ebb_tracker_chosen;
	int err = 0;

	lockdep_assert_held(&ebb_tracker_mutex);

	if (ops->start) {
		ebb_counts_reset();
		ebb_tracker_memory_set(ops);
		ebb_record_tracker(EBB_EVENT_START, ops);
		err = ops->start(ebb_tracker_device);
		ebb_record_tracker(err ? EBB_EVENT_STOPPED : EBB_EVENT_STARTED, ops);
		if (err)
			ebb_tracker_memory_set(NULL);
	}
	if (err) {
		pr_warn("tracker %s cannot be started (error %d): none runs\n", ops->name, err);
		ops = &ebb_tracker_none;
	}
	ebb_tracker_running = ops;
	return err;
}

int ebb_trackers_init(struct ebb_balloon *eb)
{
	int err;

	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device) {
		err = -EBUSY;
		goto out;
	}
	err = register_memory_notifier(&ebb_memory_notifier);
	if (err)
		goto out;
	ebb_tracker_device = eb;
	ebb_tracker_start();
out:
	mutex_unlock(&ebb_tracker_mutex);
	return err;
}

void ebb_trackers_exit(struct ebb_balloon *eb)
{
	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device == eb) {
		ebb_tracker_stop();
		ebb_recording_free();
		unregister_memory_notifier(&ebb_memory_notifier);
		ebb_tracker_device = NULL;
	}
	mutex_unlock(&ebb_tracker_mutex);
}

void ebb_trackers_pause(struct ebb_balloon *eb)
{
	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device == eb)
		ebb_tracker_stop();
	mutex_unlock(&ebb_tracker_mutex);
}

void ebb_trackers_resume(struct ebb_balloon *eb)
{
	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device == eb && !ebb_tracker_running)
		ebb_tracker_start();
	mutex_unlock(&ebb_tracker_mutex);
}

int ebb_trackers_record(struct ebb_balloon *eb, unsigned int events)
{
	bool running;
	int err = 0;

	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device != eb) {
		err = -ENODEV;
		goto out;
	}
	running = ebb_tracker_running;
	ebb_tracker_stop();
	ebb_recording_end();
	if (events)
		err = ebb_recording_begin(events);
	if (running)
		ebb_tracker_start();
out:
	mutex_unlock(&ebb_tracker_mutex);
	return err;
}

static int ebb_tracker_set(const char *value, const struct kernel_param *kp)
{
	const struct ebb_tracker_ops *ops = NULL;
	unsigned int i;
	int err = 0;

	for (i = 0; i < ARRAY_SIZE(ebb_tracker_list); i++) {
		if (sysfs_streq(value, ebb_tracker_list[i]->name))
			ops = ebb_tracker_list[i];
	}
	if (!ops) {
		pr_err("tracker=%s: legal values are none, percpu, bitmap and reporting\n", value);
		return -EINVAL;
	}

	mutex_lock(&ebb_tracker_mutex);
	ebb_tracker_chosen = ops;
	if (ebb_tracker_running && ebb_tracker_running != ops) {
		ebb_tracker_stop();
		err = ebb_tracker_start();
	}
	mutex_unlock(&ebb_tracker_mutex);
	return err;
}

/* What runs, which is none if the chosen one could not be started. */
static int ebb_tracker_get(char *buffer, const struct kernel_param *kp)
{
	const struct ebb_tracker_ops *ops;

	mutex_lock(&ebb_tracker_mutex);
	ops = ebb_tracker_running ?: ebb_tracker_chosen;
	mutex_unlock(&ebb_tracker_mutex);
	return sysfs_emit(buffer, "%s\n", ops->name);
}

static const struct kernel_param_ops ebb_tracker_param_ops = {
	.set = ebb_tracker_set,
	.get = ebb_tracker_get,
};
module_param_cb(tracker, &ebb_tracker_param_ops, NULL, 0644);
MODULE_PARM_DESC(tracker,
		 "how free pages are found for the host: none, percpu, bitmap, reporting (default)");

static void ebb_count_show(struct seq_file *m, const char *name, atomic64_t *count)
{
	seq_printf(m, "%s %lld\n", name, (long long)atomic64_read(count));
}

void ebb_trackers_show(struct ebb_balloon *eb, struct seq_file *m)
{
	struct ebb_hot_counts sum = { 0 };
	int cpu;

	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device != eb)
		goto out;

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
	ebb_count_show(m, "isolated", &ebb_counts.isolated_blocks);
	ebb_count_show(m, "isolated_pages", &ebb_counts.isolated_pages);
	ebb_count_show(m, "isolated_now", &ebb_counts.isolated_now);
	ebb_count_show(m, "isolated_most", &ebb_counts.isolated_most);
	ebb_count_show(m, "reported", &ebb_counts.reported_blocks);
	ebb_count_show(m, "reported_pages", &ebb_counts.reported_pages);
	ebb_count_show(m, "false_isolations", &ebb_counts.false_isolations);
	ebb_count_show(m, "low_memory", &ebb_counts.low_memory);
	ebb_count_show(m, "passes", &ebb_counts.passes);
	ebb_count_show(m, "report_errors", &ebb_counts.report_errors);
	if (ebb_tracker_running && ebb_tracker_running->show)
		ebb_tracker_running->show(m);
out:
	mutex_unlock(&ebb_tracker_mutex);
}
