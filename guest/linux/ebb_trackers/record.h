/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Recordings of what happens to free pages, for the model of the trackers.
 */
#ifndef EBB_TRACKERS_RECORD_H
#define EBB_TRACKERS_RECORD_H

#include <linux/jump_label.h>
#include <linux/types.h>

#include "tracker.h"

struct seq_operations;
struct zone;

/**
 * enum ebb_event - what happened to a block of pages
 * @EBB_EVENT_BLOCK: at the beginning of the recording: it is free
 * @EBB_EVENT_KNOWN: the same, and the host knows already (PageReported)
 * @EBB_EVENT_REMOVE: left the free lists, for an allocation or a per-CPU list
 * @EBB_EVENT_DRAIN: went from a per-CPU list to the free lists
 * @EBB_EVENT_TAKE: was isolated by something else than a tracker
 * @EBB_EVENT_GIVE: was put back by something else than a tracker
 * @EBB_EVENT_ISOLATE: was isolated by a tracker
 * @EBB_EVENT_PUTBACK: was put back by a tracker
 * @EBB_EVENT_ALLOC: was handed to a caller
 * @EBB_EVENT_FREE: is going to be free
 * @EBB_EVENT_REPORT: is going to be named to the host
 * @EBB_EVENT_ANSWER: the host is done with it
 * @EBB_EVENT_FAILED: the report has failed, and the host is done with it
 * @EBB_EVENT_MARK: tracker bitmap: its bit is going to be set
 * @EBB_EVENT_CLEAR: tracker bitmap: its bit is going to be cleared
 * @EBB_EVENT_CAPTURE: tracker percpu: was written into the CPU's array
 * @EBB_EVENT_LOST: tracker percpu: found the CPU's array full
 * @EBB_EVENT_AGAIN: tracker percpu: the last entry of the CPU's array stands for its block
 *
 * Those without a block have a number in its place:
 * @EBB_EVENT_SCAN: tracker percpu: the CPU's array was scanned; entries left
 * @EBB_EVENT_FULL: tracker percpu: the CPU's array has no room before its thread's turn
 * @EBB_EVENT_FLUSH: tracker percpu: the CPU's array is handed over before it is full
 * @EBB_EVENT_TURN: tracker percpu: the thread has taken the array; entries
 * @EBB_EVENT_START: a tracker is being started; its place in the list of trackers
 * @EBB_EVENT_STARTED: it runs
 * @EBB_EVENT_STOP: it is being stopped
 * @EBB_EVENT_STOPPED: it does not run any more, or could not be started
 * @EBB_EVENTS: how many there are
 */
enum ebb_event {
	EBB_EVENT_BLOCK,
	EBB_EVENT_KNOWN,
	EBB_EVENT_REMOVE,
	EBB_EVENT_DRAIN,
	EBB_EVENT_TAKE,
	EBB_EVENT_GIVE,
	EBB_EVENT_ISOLATE,
	EBB_EVENT_PUTBACK,
	EBB_EVENT_ALLOC,
	EBB_EVENT_FREE,
	EBB_EVENT_REPORT,
	EBB_EVENT_ANSWER,
	EBB_EVENT_FAILED,
	EBB_EVENT_MARK,
	EBB_EVENT_CLEAR,
	EBB_EVENT_CAPTURE,
	EBB_EVENT_LOST,
	EBB_EVENT_AGAIN,
	EBB_EVENT_SCAN,
	EBB_EVENT_FULL,
	EBB_EVENT_FLUSH,
	EBB_EVENT_TURN,
	EBB_EVENT_START,
	EBB_EVENT_STARTED,
	EBB_EVENT_STOP,
	EBB_EVENT_STOPPED,
	EBB_EVENTS
};

DECLARE_STATIC_KEY_FALSE(ebb_recording);

void ebb_record_write(enum ebb_event event, struct zone *zone, unsigned long pfn,
		      unsigned int order);

/**
 * ebb_record() - write an event down, if there is a recording
 * @event: what happened
 * @zone: the block's zone; NULL for an event without a block
 * @pfn: the block's first page, or the event's number
 * @order: the block's order
 *
 * May be called in any context but NMI, under any lock.
 *
 * Events are in the order of these calls, so what protects an event's effect
 * has to be held here: the zone's lock for what changes the free lists and for
 * what is isolated, put back or cleared under it; interrupts off on the array's
 * CPU for that array. The others have no lock that the allocator or a tracker
 * would take as well, and are written down on the side on which a page has no
 * other user: before it can get to the free lists (free), after it has left
 * them (alloc), and between its isolation and its return (report, answer,
 * failed). mark is before the bit is set, and clear before it is cleared, so
 * that neither can be overtaken by what follows from it.
 */
static __always_inline void ebb_record(enum ebb_event event, struct zone *zone, unsigned long pfn,
				       unsigned int order)
{
	if (static_branch_unlikely(&ebb_recording))
		ebb_record_write(event, zone, pfn, order);
}

/* Writes a change of a tracker down: the driver calls it. */
void ebb_record_tracker(enum ebb_tracker_change change, enum ebb_tracker which);

/**
 * ebb_recording_begin() - begin a recording, in place of the last one
 * @events: room for so many
 *
 * Sleeps. No tracker runs and no recording is under way: the caller sees to both.
 *
 * Return: 0, -ENOMEM, or -EOPNOTSUPP if the kernel lacks what it needs.
 */
int ebb_recording_begin(unsigned int events);

/* Ends the recording that is under way, if any. It can be read from now on. Sleeps. */
void ebb_recording_end(void);

/* Forgets the recording, ending it if it is under way. Sleeps. */
void ebb_recording_free(void);

/* Most events of a recording: 24 MiB. */
#define EBB_RECORDING_MAX	(1U << 20)

/* Of the file, which record_file.c has. */
void ebb_recording_file_add(void);
void ebb_recording_file_remove(void);
extern const struct seq_operations ebb_recording_seq_ops;

/* Number of a recording, by which a file notices that it was replaced. Its private data. */
struct ebb_recording_reader {
	unsigned int generation;
};

unsigned int ebb_recording_generation(void);

/*
 * The hooks into the kernel, record_hooks.c.
 */

/* Return: 0 or -EOPNOTSUPP. */
int ebb_record_hooks_add(void);

/* Return: events that the hooks have missed. When it returns, no hook runs. */
u64 ebb_record_hooks_remove(void);

#endif
