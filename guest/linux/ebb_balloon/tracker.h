/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Trackers: ways to find out which pages are free and to tell the host so.
 *
 * A tracker watches the page allocator, takes free blocks out of it
 * ("isolates" them), hands them to ebb_report_blocks() and puts them back.
 * At most one tracker runs at a time, for one device.
 */
#ifndef EBB_BALLOON_TRACKER_H
#define EBB_BALLOON_TRACKER_H

#include <linux/types.h>

struct dentry;
struct ebb_balloon;
struct mutex;
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
 *
 * Return: 0, or -EIO if the device is broken or being removed.
 */
int ebb_report_blocks(struct ebb_balloon *eb, const struct ebb_block *blocks, unsigned int count);

/* Waiting for one's turn to isolate and report, and its end: see report.c. */
bool ebb_report_begin(struct ebb_balloon *eb);
void ebb_report_end(struct ebb_balloon *eb);

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
 * says why, and none runs until the parameter is written.
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
 * ebb_trackers_record() - begin or end a recording, see record.h
 * @eb: the device
 * @events: room for so many; 0 ends the recording that is under way
 *
 * The tracker that runs is stopped before and started again afterwards: a
 * recording begins without any state of a tracker, and nothing is isolated at
 * either end of it.
 *
 * Return: 0, -ENODEV if another device has the trackers, or what
 * ebb_recording_begin() returned.
 */
int ebb_trackers_record(struct ebb_balloon *eb, unsigned int events);

/**
 * ebb_debugfs_add() - create counters and recording in /sys/kernel/debug/ebb_balloon
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

/**
 * struct ebb_tracker_ops - what a tracker implements
 * @name: value of the parameter "tracker"
 * @start: hooks up; -EOPNOTSUPP if the kernel lacks what it needs
 * @stop: unhooks; afterwards nothing is isolated. Only after a good @start.
 * @show: writes further "name value" lines; may be NULL
 * @online: memory was added to a zone; may be NULL
 * @offline: memory has left; forget its page frames, their struct pages go next.
 *	May be NULL. This and @online run under ebb_memory_mutex.
 */
struct ebb_tracker_ops {
	const char *name;
	int (*start)(struct ebb_balloon *eb);
	void (*stop)(void);
	void (*show)(struct seq_file *m);
	void (*online)(unsigned long pfn, unsigned long pages);
	void (*offline)(unsigned long pfn, unsigned long pages);
};

/*
 * Held while a tracker looks at page frames that it wrote down some time ago:
 * memory that is taken offline meanwhile stays until then. Not held while
 * waiting for the host.
 */
extern struct mutex ebb_memory_mutex;

extern const struct ebb_tracker_ops ebb_tracker_percpu;
extern const struct ebb_tracker_ops ebb_tracker_bitmap;
extern const struct ebb_tracker_ops ebb_tracker_reporting;

/* Whether this is a pass of the kernel's own reporting. In any context. */
bool ebb_reporting_at_work(void);

/*
 * Whether the allocator clears the mark of a reported block when it takes the
 * block: from the first time on that the kernel's own reporting was in use.
 */
bool ebb_kernel_marks(void);

/* Entries of the array of a CPU. */
unsigned int ebb_percpu_entries(void);

#endif
