// SPDX-License-Identifier: GPL-2.0-only
/*
 * Choosing a tracker, switching at run time, common counters, registration of
 * trackers by another module.
 *
 * Lock order: ebb_tracker_mutex, then what a tracker has, then a zone's lock.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/string.h>

#include "counts.h"
#include "symbols.h"
#include "tracker.h"

struct ebb_counts ebb_counts;
EXPORT_SYMBOL_GPL(ebb_counts);

static const char * const ebb_tracker_names[EBB_TRACKERS] = {
	[EBB_TRACKER_NONE] = "none",
	[EBB_TRACKER_PERCPU] = "percpu",
	[EBB_TRACKER_BITMAP] = "bitmap",
	[EBB_TRACKER_REPORTING] = "reporting",
};

static const struct ebb_tracker_ops ebb_tracker_none;

/* Nothing runs: the device is away. "none" runs, too. */
#define EBB_TRACKER_AWAY EBB_TRACKERS

/* Protects all of the following. Taken before any other lock of this module. */
static DEFINE_MUTEX(ebb_tracker_mutex);
/* What the parameter says. */
static enum ebb_tracker ebb_tracker_chosen = EBB_TRACKER_REPORTING;
static enum ebb_tracker ebb_tracker_running = EBB_TRACKER_AWAY;
/* The device that has the trackers. */
static struct ebb_balloon *ebb_tracker_device;
/* Of ebb_trackers, or NULL. */
static const struct ebb_tracker_module *ebb_tracker_module;

/* NULL: it is in a module that is not loaded. */
static const struct ebb_tracker_ops *ebb_tracker_find(enum ebb_tracker which)
{
	lockdep_assert_held(&ebb_tracker_mutex);

	switch (which) {
	case EBB_TRACKER_REPORTING:
		return &ebb_tracker_reporting;
	case EBB_TRACKER_PERCPU:
		return ebb_tracker_module ? ebb_tracker_module->percpu : NULL;
	case EBB_TRACKER_BITMAP:
		return ebb_tracker_module ? ebb_tracker_module->bitmap : NULL;
	default:
		return &ebb_tracker_none;
	}
}

static bool ebb_tracker_is_of_module(enum ebb_tracker which)
{
	return which == EBB_TRACKER_PERCPU || which == EBB_TRACKER_BITMAP;
}

static void ebb_counts_reset(void)
{
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

static void ebb_tracker_changes(enum ebb_tracker_change change, enum ebb_tracker which)
{
	if (ebb_tracker_module)
		ebb_tracker_module->changed(change, which);
}

static void ebb_tracker_stop(void)
{
	const struct ebb_tracker_ops *ops = ebb_tracker_find(ebb_tracker_running);

	if (ops->stop) {
		ebb_tracker_changes(EBB_TRACKER_STOPS, ebb_tracker_running);
		ops->stop();
		ebb_tracker_changes(EBB_TRACKER_STOPPED, ebb_tracker_running);
	}
	ebb_tracker_running = EBB_TRACKER_AWAY;
}

/* Starts what is chosen. Nothing may be running. */
static int ebb_tracker_start(void)
{
	enum ebb_tracker which = ebb_tracker_chosen;
	const struct ebb_tracker_ops *ops = ebb_tracker_find(which);
	int err = 0;

	ebb_tracker_running = EBB_TRACKER_NONE;
	if (!ops) {
		pr_info("tracker=%s: none runs until the module ebb_trackers is loaded\n",
			ebb_tracker_names[which]);
		return 0;
	}
	if (ops->isolates)
		err = ebb_symbols_find();
	if (!err && ops->start) {
		ebb_counts_reset();
		ebb_tracker_changes(EBB_TRACKER_STARTS, which);
		err = ops->start(ebb_tracker_device);
		ebb_tracker_changes(err ? EBB_TRACKER_STOPPED : EBB_TRACKER_STARTED, which);
	}
	if (err)
		pr_warn("tracker %s cannot be started (error %d): none runs\n",
			ebb_tracker_names[which], err);
	else
		ebb_tracker_running = which;
	return err;
}

int ebb_trackers_init(struct ebb_balloon *eb)
{
	int err = 0;

	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device) {
		err = -EBUSY;
	} else {
		ebb_tracker_device = eb;
		ebb_tracker_start();
	}
	mutex_unlock(&ebb_tracker_mutex);
	return err;
}

void ebb_trackers_exit(struct ebb_balloon *eb)
{
	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device == eb) {
		ebb_tracker_stop();
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
	if (ebb_tracker_device == eb && ebb_tracker_running == EBB_TRACKER_AWAY)
		ebb_tracker_start();
	mutex_unlock(&ebb_tracker_mutex);
}

int ebb_trackers_register(const struct ebb_tracker_module *module)
{
	int err = 0;

	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_module) {
		err = -EBUSY;
		goto out;
	}
	ebb_tracker_module = module;
	/* What was chosen while it was not there. */
	if (ebb_tracker_running == EBB_TRACKER_NONE && ebb_tracker_is_of_module(ebb_tracker_chosen))
		ebb_tracker_start();
out:
	mutex_unlock(&ebb_tracker_mutex);
	return err;
}
EXPORT_SYMBOL_GPL(ebb_trackers_register);

void ebb_trackers_unregister(const struct ebb_tracker_module *module)
{
	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_is_of_module(ebb_tracker_running)) {
		pr_info("tracker %s ends with its module: none runs\n",
			ebb_tracker_names[ebb_tracker_running]);
		ebb_tracker_stop();
		ebb_tracker_running = EBB_TRACKER_NONE;
	}
	if (ebb_tracker_is_of_module(ebb_tracker_chosen))
		ebb_tracker_chosen = EBB_TRACKER_NONE;
	ebb_tracker_module = NULL;
	mutex_unlock(&ebb_tracker_mutex);
}
EXPORT_SYMBOL_GPL(ebb_trackers_unregister);

int ebb_trackers_restart(int (*between)(unsigned int argument), unsigned int argument)
{
	bool running;
	int err;

	mutex_lock(&ebb_tracker_mutex);
	running = ebb_tracker_running != EBB_TRACKER_AWAY;
	ebb_tracker_stop();
	err = between(argument);
	if (running)
		ebb_tracker_start();
	mutex_unlock(&ebb_tracker_mutex);
	return err;
}
EXPORT_SYMBOL_GPL(ebb_trackers_restart);

static int ebb_tracker_set(const char *value, const struct kernel_param *kp)
{
	int which = sysfs_match_string(ebb_tracker_names, value);
	int err = 0;

	if (which < 0) {
		pr_err("tracker=%s: legal values are none, percpu, bitmap and reporting\n", value);
		return -EINVAL;
	}

	mutex_lock(&ebb_tracker_mutex);
	/* Before there is a device, as at load time, it is only remembered. */
	if (ebb_tracker_device && !ebb_tracker_find(which)) {
		pr_err("tracker=%s: load the module ebb_trackers first\n",
		       ebb_tracker_names[which]);
		err = -EOPNOTSUPP;
		goto out;
	}
	ebb_tracker_chosen = which;
	if (ebb_tracker_running != EBB_TRACKER_AWAY && ebb_tracker_running != which) {
		ebb_tracker_stop();
		err = ebb_tracker_start();
	}
out:
	mutex_unlock(&ebb_tracker_mutex);
	return err;
}

/* What runs, which is none if the chosen one could not be started. */
static int ebb_tracker_get(char *buffer, const struct kernel_param *kp)
{
	enum ebb_tracker which;

	mutex_lock(&ebb_tracker_mutex);
	which = ebb_tracker_running;
	if (which == EBB_TRACKER_AWAY)
		which = ebb_tracker_chosen;
	mutex_unlock(&ebb_tracker_mutex);
	return sysfs_emit(buffer, "%s\n", ebb_tracker_names[which]);
}

static const struct kernel_param_ops ebb_tracker_param_ops = {
	.set = ebb_tracker_set,
	.get = ebb_tracker_get,
};
module_param_cb(tracker, &ebb_tracker_param_ops, NULL, 0644);
MODULE_PARM_DESC(tracker,
		 "how free pages are found for the host: none, reporting (default); percpu, bitmap (module ebb_trackers)");

static void ebb_count_show(struct seq_file *m, const char *name, atomic64_t *count)
{
	seq_printf(m, "%s %lld\n", name, (long long)atomic64_read(count));
}

void ebb_trackers_show(struct ebb_balloon *eb, struct seq_file *m)
{
	const struct ebb_tracker_ops *ops;

	mutex_lock(&ebb_tracker_mutex);
	if (ebb_tracker_device != eb)
		goto out;
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
	ops = ebb_tracker_find(ebb_tracker_running);
	if (ops->show)
		ops->show(m);
out:
	mutex_unlock(&ebb_tracker_mutex);
}
