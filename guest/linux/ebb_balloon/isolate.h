/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Taking free blocks out of the page allocator, reporting them, putting them back.
 */
#ifndef EBB_BALLOON_ISOLATE_H
#define EBB_BALLOON_ISOLATE_H

#include "compat.h"
#include "tracker.h"

/**
 * struct ebb_batch - blocks of one zone that are out of the allocator together
 * @zone: where they are from
 * @held_count: entries of @held
 * @named_count: entries of @named
 * @marks: all that is held is named: mark it as the kernel's own reporting does,
 *	which does not report it again then
 * @held: what was taken, as the allocator had it
 * @named: what the host is to be told: parts of @held, or all of it
 */
struct ebb_batch {
	struct zone *zone;
	unsigned int held_count;
	unsigned int named_count;
	bool marks;
	struct ebb_block held[EBB_REPORT_MAX];
	struct ebb_block named[EBB_REPORT_MAX];
};

/**
 * enum ebb_hold - what became of an attempt to take a block
 * @EBB_HELD: it is out of the allocator, and in the batch
 * @EBB_NOT_FREE: the allocator has no such block in this zone
 * @EBB_REPORTED: the kernel's own reporting has told the host already
 * @EBB_OFFLIMITS: somebody is emptying that memory, for hotplug or a large
 *	allocation; it must stay where it is
 * @EBB_LOW_MEMORY: the zone needs what is free
 */
enum ebb_hold {
	EBB_HELD,
	EBB_NOT_FREE,
	EBB_REPORTED,
	EBB_OFFLIMITS,
	EBB_LOW_MEMORY,
};

/**
 * ebb_find_free() - find the free block that a page belongs to
 * @pfn: the page, of memory that is online
 * @least_order: smallest block that is of interest
 * @found: what was found
 *
 * Needs no lock. Without the zone's lock the answer is only likely.
 */
bool ebb_find_free(unsigned long pfn, unsigned int least_order, struct ebb_block *found);

/**
 * ebb_batch_hold() - take a block out of the allocator
 * @batch: a batch with room; its zone's lock is held, interrupts are off
 * @block: what ebb_find_free() found, possibly long ago
 */
enum ebb_hold ebb_batch_hold(struct ebb_batch *batch, const struct ebb_block *block);

/* Adds what the host shall be told; within a block that is held. */
void ebb_batch_name(struct ebb_batch *batch, unsigned long pfn, unsigned int order);

/**
 * ebb_batch_report() - report what is named, put back what is held
 * @eb: the device
 * @batch: empty again afterwards
 *
 * Sleeps. Return: what ebb_report_blocks() returned; 0 for an empty batch.
 */
int ebb_batch_report(struct ebb_balloon *eb, struct ebb_batch *batch);

/* Whether a zone with so many free pages could do without a full batch of blocks. */
bool ebb_zone_has_room_for(struct zone *zone, unsigned long free_pages, unsigned int order);

/*
 * Whether a zone can do without a full batch for a while: the kernel's own
 * reporting asks the same (mm/page_reporting.c).
 */
bool ebb_zone_has_room(struct zone *zone, unsigned int order);

#endif
