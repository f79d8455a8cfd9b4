/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Trackers: ways to find out which pages are free and to tell the host so.
 *
 * A tracker watches the page allocator, takes free blocks out of it
 * ("isolates" them), hands them to ebb_report_blocks() and puts them back.
 * At most one tracker runs at a time, for one device.
 *
 * The driver has the kernel's own reporting. The module ebb_trackers registers
 * others, which find blocks; only isolate.c takes them out and reports them.
 */
#ifndef EBB_BALLOON_TRACKER_H
#define EBB_BALLOON_TRACKER_H

#include <linux/types.h>

struct dentry;
struct ebb_balloon;
struct seq_file;

/* Blocks in one report: PAGE_REPORTING_CAPACITY of the kernel's own reporting. */
#define EBB_REPORT_MAX 32

/**
 * struct ebb_block - a naturally aligned block of free memory
 * @pfn: its first page frame, in the kernel's pages
 * @order: log2 of its number of pages
 */
struct ebb_block {
	unsigned long pfn;
	unsigned int order;
};

/*
 * Of the core.
 */

/**
 * ebb_report_blocks() - tell the host that blocks are free, wait for its answer
 * @eb: the device
 * @blocks: blocks that nobody else can allocate before this function returns
 * @count: 1 to EBB_REPORT_MAX
 *
 * Only between ebb_report_begin() and ebb_report_end(). Sleeps. When it
 * returns, the host does not touch the pages any more, whatever it returns.
 * Recordings have a probe on it.
 *
 * Return: 0, or -EIO if the device is broken or being removed.
 */
int ebb_report_blocks(struct ebb_balloon *eb, const struct ebb_block *blocks, unsigned int count);

/* Waiting for one's turn to isolate and report, and its end: see report.c. */
bool ebb_report_begin(struct ebb_balloon *eb);
void ebb_report_end(struct ebb_balloon *eb);

/* Whether this task isolates blocks for a report, and puts them back. In any context. */
bool ebb_isolates_now(void);

/* Writes the core's counters, as lines of "name value". May sleep. */
void ebb_balloon_show(struct ebb_balloon *eb, struct seq_file *m);

/*
 * Of the trackers. All of these sleep and may not be called from each other's
 * callbacks; the core calls them one after the other for one device.
 */

/**
 * ebb_trackers_init() - start the tracker that the parameter names
 * @eb: a device that is ready and has negotiated PAGE_REPORTING
 *
 * A tracker that this kernel cannot run is not an error: a line in the log
 * says why, and none runs until the parameter is written. One of ebb_trackers
 * starts when that module is loaded.
 *
 * Return: 0, or -EBUSY if another device has the trackers. That is not a
 * reason to fail the device either; ebb_trackers_exit() may be called anyway.
 */
int ebb_trackers_init(struct ebb_balloon *eb);

/**
 * ebb_trackers_exit() - stop the tracker for good
 * @eb: the device that was given to ebb_trackers_init()
 *
 * When it returns, no hook is in place, no thread or work item of a tracker
 * runs, and no page is isolated. For a device without trackers it does nothing.
 * On removal the device must be reset and sleepers in ebb_report_blocks()
 * must be woken before.
 */
void ebb_trackers_exit(struct ebb_balloon *eb);

/* Stop for hibernation, and start what was running before. */
void ebb_trackers_pause(struct ebb_balloon *eb);
void ebb_trackers_resume(struct ebb_balloon *eb);

/* Writes the trackers' counters, as lines of "name value". May sleep. */
void ebb_trackers_show(struct ebb_balloon *eb, struct seq_file *m);

/**
 * ebb_debugfs_add() - create /sys/kernel/debug/ebb_balloon/counters
 * @eb: a device for which ebb_balloon_show() can be called from now on
 *
 * Return: the directory, for ebb_debugfs_remove(), which accepts whatever this
 * returns (an error pointer without debugfs or for a second device).
 */
struct dentry *ebb_debugfs_add(struct ebb_balloon *eb);
void ebb_debugfs_remove(struct dentry *dir);

/*
 * Among the trackers.
 */

/* All trackers. Recordings have these numbers. */
enum ebb_tracker {
	EBB_TRACKER_NONE,
	EBB_TRACKER_PERCPU,
	EBB_TRACKER_BITMAP,
	EBB_TRACKER_REPORTING,
	EBB_TRACKERS
};

/**
 * struct ebb_tracker_ops - what a tracker implements
 * @isolates: it uses isolate.c, which does not work on every kernel
 * @start: hooks up; -EOPNOTSUPP if the kernel lacks what it needs
 * @stop: unhooks; afterwards nothing is isolated. Only after a good @start.
 * @show: writes further "name value" lines; may be NULL
 */
struct ebb_tracker_ops {
	bool isolates;
	int (*start)(struct ebb_balloon *eb);
	void (*stop)(void);
	void (*show)(struct seq_file *m);
};

extern const struct ebb_tracker_ops ebb_tracker_reporting;

/* Whether this is a pass of the kernel's own reporting. In any context. */
bool ebb_reporting_at_work(void);

/*
 * Whether the allocator clears the mark of a reported block when it takes the
 * block: from the first time on that the kernel's own reporting was in use.
 */
bool ebb_kernel_marks(void);

/* What happens to a tracker: before and after its start, and its stop. */
enum ebb_tracker_change {
	EBB_TRACKER_STARTS,
	EBB_TRACKER_STARTED,
	EBB_TRACKER_STOPS,
	EBB_TRACKER_STOPPED,
};

/**
 * struct ebb_tracker_module - what ebb_trackers adds to the driver
 * @percpu: a tracker
 * @bitmap: another one
 * @changed: is called at each change of any tracker, with tracker.c's mutex held.
 *	A start that fails is STARTS and STOPPED.
 */
struct ebb_tracker_module {
	const struct ebb_tracker_ops *percpu;
	const struct ebb_tracker_ops *bitmap;
	void (*changed)(enum ebb_tracker_change change, enum ebb_tracker which);
};

/**
 * ebb_trackers_register() - add the trackers of a module
 * @module: stays valid until ebb_trackers_unregister()
 *
 * Starts one of them if the parameter names it. Sleeps.
 *
 * Return: 0, or -EBUSY if there is such a module.
 */
int ebb_trackers_register(const struct ebb_tracker_module *module);

/**
 * ebb_trackers_unregister() - remove them
 * @module: what was registered
 *
 * If one of them runs, it is stopped, and "none" is chosen. Sleeps until the
 * host has answered a report that is under way. Afterwards nothing of the
 * module is called.
 */
void ebb_trackers_unregister(const struct ebb_tracker_module *module);

/**
 * ebb_trackers_restart() - stop the tracker, call a function, start it again
 * @between: what is called while no tracker runs and nothing is isolated for one
 * @argument: is passed to it
 *
 * Return: what @between returned.
 */
int ebb_trackers_restart(int (*between)(unsigned int argument), unsigned int argument);

#endif
