/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The driver's state, and the interfaces between its files.
 *
 * Units: "pages" are pages of the kernel (PAGE_SIZE), "units" are the 4 KiB
 * pages in which a balloon device counts.
 */
#ifndef EBB_BALLOON_H
#define EBB_BALLOON_H

#include <linux/atomic.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/memory.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/scatterlist.h>
#include <linux/shrinker.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/virtio.h>
#include <linux/virtio_balloon.h>
#include <linux/virtio_config.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "compat.h"
#include "protocol.h"
#include "tracker.h"

/* Units of the device in a page of the kernel. */
#define EBB_UNIT_SHIFT		(PAGE_SHIFT - VIRTIO_BALLOON_PFN_SHIFT)

/* Most units in one message: 256 MiB. More would delay the next messages. */
#define EBB_MESSAGE_UNITS	65536U
/* Most ranges in a set; a message of one page has at most 254, a bitmap more. */
#define EBB_SET_RANGES		1024
/* Page numbers in a buffer without messages, like the stock driver. */
#define EBB_BARE_PFNS		256
/* Most messages of inflation and deflation in flight. */
#define EBB_BULK_MESSAGES	4
/* Messages of compaction: two for each page in migration. */
#define EBB_MOVE_MESSAGES	64
/* Size of a message that names one page, in bytes. */
#define EBB_MOVE_BYTES \
	(sizeof(struct virtio_balloon_msg_hdr) + (sizeof(__le32) << EBB_UNIT_SHIFT))

enum ebb_queue {
	EBB_VQ_INFLATE,
	EBB_VQ_DEFLATE,
	EBB_VQ_STATS,
	EBB_VQ_FREE_PAGE,
	EBB_VQ_REPORTING,
	EBB_VQ_HOST_REQUEST,
	EBB_VQS
};

enum ebb_counter {
	EBB_INFLATED_PAGES,
	EBB_DEFLATED_PAGES,
	EBB_OOM_PAGES,
	EBB_MOVED_PAGES,
	EBB_MESSAGES,
	EBB_MESSAGE_BYTES,
	EBB_MESSAGES_BARE,
	EBB_MESSAGES_PFNS,
	EBB_MESSAGES_BITMAP,
	EBB_MESSAGES_RANGES,
	EBB_ALLOCATE_NS,
	EBB_SEND_NS,
	EBB_RELEASE_NS,
	EBB_SPLIT_BLOCKS,
	EBB_REPORTS,
	EBB_REPORT_BLOCKS,
	EBB_EARLY_PAGES,
	EBB_HINTED_BLOCKS,
	EBB_REQUESTS,
	EBB_BAD_REQUESTS,
	EBB_CANCELS,
	EBB_ANSWERS_DONE,
	EBB_ANSWERS_ABORTED,
	EBB_ANSWERS_SUPERSEDED,
	EBB_ANSWER_MESSAGES,
	EBB_ANSWER_BYTES,
	EBB_BLOCKS_NAMED,
	EBB_PAGES_NAMED,
	EBB_WALK_NS,
	EBB_LONGEST_LOCK_NS,
	EBB_LONGEST_LOCK_EVER_NS,
	EBB_LOCKS,
	EBB_COUNTERS
};

/**
 * struct ebb_range - contiguous memory
 * @start: first unit
 * @units: number of units
 */
struct ebb_range {
	u64 start;
	u64 units;
};

/**
 * struct ebb_set - memory named by one message
 * @ranges: the ranges; consecutive neighbours are merged
 * @nr: number of ranges
 * @max: capacity of @ranges
 * @units: units in all of them
 * @first: lowest unit
 * @end: highest unit plus one
 * @alignment: all bits that are set in any start or end
 */
struct ebb_set {
	struct ebb_range *ranges;
	unsigned int nr;
	unsigned int max;
	u64 units;
	u64 first;
	u64 end;
	u64 alignment;
};

/**
 * struct ebb_format - allowed formats of a message
 * @bare: an array of page numbers without a header, for devices without messages
 * @encodings: bits of the allowed encodings
 * @bytes: largest size of the message
 */
struct ebb_format {
	bool bare;
	u8 encodings;
	u32 bytes;
};

enum ebb_message_use { EBB_USE_BULK, EBB_USE_OOM, EBB_USE_MOVE };
enum ebb_message_state { EBB_IDLE, EBB_SENT, EBB_DONE };

/**
 * struct ebb_message - a message on inflateq or deflateq and its pages
 * @node: in a list of idle messages, or in the list of returned ones
 * @use: selects the list of idle messages
 * @state: current state; protected by the device's lock
 * @command: INFLATE or DEFLATE
 * @pages: first pages of the blocks, linked by lru, their order in private
 * @set: the same blocks
 * @buffer: buffer for the written message
 * @move: of messages of compaction: @buffer, @set's ranges, and the page, whose
 *	lru is not the driver's
 */
struct ebb_message {
	struct list_head node;
	enum ebb_message_use use;
	enum ebb_message_state state;
	u16 command;
	struct list_head pages;
	struct ebb_set set;
	void *buffer;
	struct {
		struct page *page;
		struct ebb_range range;
		u8 bytes[EBB_MOVE_BYTES];
	} move;
};

enum ebb_hinting_phase {
	/* Idle. */
	EBB_HINTING_IDLE,
	/* The command id has to be sent. */
	EBB_HINTING_BEGIN,
	/* Blocks are being sent. */
	EBB_HINTING_BLOCKS,
	/* The end has to be sent. */
	EBB_HINTING_END,
};

/**
 * struct ebb_hinting - free page hinting
 * @work: allocates free blocks and hints them
 * @phase: next step of @work
 * @lock: protects the queue, @blocks, @begin_sent and @end_sent
 * @blocks: hinted blocks, kept until the host is done or memory is short
 * @nr_blocks: number of @blocks
 * @changed: the command in the configuration has to be read
 * @command: the last command that was read
 * @answered: id of the command that is or was answered
 * @begin: @answered, for the device
 * @end: the end of an answer, for the device
 * @begin_sent: the device has @begin
 * @end_sent: the device has @end
 * @shrinker: frees blocks when memory is short
 * @registered: @shrinker is registered
 */
struct ebb_hinting {
	struct work_struct work;
	enum ebb_hinting_phase phase;
	/* Taken in the work item and in the shrinker. */
	spinlock_t lock;
	struct list_head blocks;
	unsigned long nr_blocks;
	atomic_t changed;
	u32 command;
	u32 answered;
	__virtio32 begin;
	__virtio32 end;
	bool begin_sent;
	bool end_sent;
#ifdef EBB_ALLOCATED_SHRINKER
	struct shrinker *shrinker;
#else
	struct shrinker shrinker;
#endif
	bool registered;
};

/* A statistic as the device sees it; the kernel's header may end at tag 9. */
#define EBB_STATS	16

struct ebb_host_requests;
struct ebb_report_now;

struct ebb_balloon {
	struct virtio_device *vdev;
	struct virtqueue *vqs[EBB_VQS];
	struct workqueue_struct *wq;
	struct dentry *debugfs;

	/* Bits of the negotiated encodings, 0 without messages. */
	u8 negotiated;
	bool deflate_on_oom;
	/* Blocks are taken directly off the allocator's lists. */
	bool direct;

	/*
	 * Protects the queues inflateq and deflateq, lists of messages, @blocks,
	 * the numbers of units, and @stopping. Taken in interrupts.
	 */
	spinlock_t lock;
	/* No new work may be queued. */
	bool stopping;
	/* The device was reset: waiters must return. */
	bool broken;
	struct work_struct failed_work;
	/* Serializes stopping the device. */
	struct mutex stop_mutex;
	bool stopped;

	/* Moves the balloon towards the target. */
	struct delayed_work size_work;
	atomic_t config_changed;
	u64 target;
	unsigned int order;
	/* Allocated blocks that are in no message yet, sorted by address. */
	struct list_head pending;
	bool shortage_told;
	/* Memory was deflated on out of memory: no inflation until the host writes the target. */
	bool yielding;
	ktime_t waiting_since;

	/* Units in the balloon. */
	u64 units;
	/* Units in messages in flight. */
	u64 inflating;
	u64 deflating;
	/* Serializes writers of the configuration. */
	struct mutex actual_mutex;
	u32 actual;

	/*
	 * Whole blocks, most recent first; single pages are in @info, and in @spare those that a
	 * message had no place for.
	 */
	struct list_head blocks;
	struct list_head spare;
	struct balloon_dev_info info;
	/* Pages in @info, also those that compaction has isolated at the moment. */
	atomic_long_t listed;

	struct list_head idle_bulk;
	struct list_head idle_move;
	struct list_head done;
	wait_queue_head_t acked;
	struct ebb_message bulk[EBB_BULK_MESSAGES];
	struct ebb_message oom;
	struct ebb_message *moves;
	struct notifier_block oom_notifier;

	struct work_struct stats_work;
	struct virtio_balloon_stat stats[EBB_STATS];

	struct ebb_hinting hinting;

	/* Reports: one at a time. */
	wait_queue_head_t report_wait;
	unsigned long report_busy;
	/* The queue, and @report_done. */
	spinlock_t report_lock;
	bool report_done;
	struct scatterlist report_sg[EBB_REPORT_MAX];

	struct ebb_host_requests *requests;
	struct ebb_report_now *report_now;

	atomic64_t counters[EBB_COUNTERS];
	atomic64_t order_blocks[EBB_LARGEST_ORDER + 1];
};

static inline void ebb_count(struct ebb_balloon *eb, enum ebb_counter counter, u64 by)
{
	atomic64_add(by, &eb->counters[counter]);
}

static inline bool ebb_offers(struct ebb_balloon *eb, unsigned int feature)
{
	return virtio_has_feature(eb->vdev, feature);
}

/* main.c */
void ebb_device_failed(struct ebb_balloon *eb);
extern unsigned int ebb_max_order;

/* Order of the blocks that an inflation tries first. */
static inline unsigned int ebb_largest_order(void)
{
	return min_t(unsigned int, READ_ONCE(ebb_max_order), EBB_LARGEST_ORDER);
}

u8 ebb_encodings(struct ebb_balloon *eb);

/* message.c */
void ebb_set_clear(struct ebb_set *set);
bool ebb_set_add(struct ebb_set *set, const struct ebb_format *format, u64 start, u64 units);
u32 ebb_set_room(const struct ebb_set *set, const struct ebb_format *format);
u32 ebb_set_write(const struct ebb_set *set, const struct ebb_format *format,
		  const struct virtio_balloon_msg_hdr *like, void *buffer, u8 *encoding);
struct ebb_format ebb_message_format(struct ebb_balloon *eb, const struct ebb_message *message);
int ebb_messages_init(struct ebb_balloon *eb);
void ebb_messages_exit(struct ebb_balloon *eb);
int ebb_messages_start(struct ebb_balloon *eb);
struct ebb_message *ebb_message_get(struct ebb_balloon *eb, enum ebb_message_use use);
void ebb_message_put(struct ebb_balloon *eb, struct ebb_message *message);
int ebb_message_send(struct ebb_balloon *eb, struct ebb_message *message, u16 command);
void ebb_messages_returned(struct virtqueue *vq);
void ebb_messages_take_back(struct ebb_balloon *eb);

/* block.c */
void ebb_blocks_start(struct ebb_balloon *eb);
struct page *ebb_whole_take(struct ebb_balloon *eb, unsigned int order);
void ebb_whole_give(struct ebb_balloon *eb, struct page *page, unsigned int order);
struct page *ebb_block_allocate(struct ebb_balloon *eb, u64 units, unsigned int *order);
void ebb_block_free(struct ebb_balloon *eb, struct page *page, unsigned int order);
void ebb_blocks_keep(struct ebb_balloon *eb, struct list_head *pages, bool again);
void ebb_blocks_take(struct ebb_balloon *eb, struct ebb_message *message, u64 units);
int ebb_by_address(void *unused, const struct list_head *left, const struct list_head *right);
void ebb_blocks_free(struct ebb_balloon *eb, struct list_head *pages);
void ebb_blocks_free_all(struct ebb_balloon *eb);

/* move.c */
void ebb_move_init(struct ebb_balloon *eb);
bool ebb_move_end(struct ebb_balloon *eb, struct ebb_message *message);

/* inflate.c */
void ebb_size_init(struct ebb_balloon *eb);
int ebb_size_start(struct ebb_balloon *eb);
void ebb_size_kick(struct ebb_balloon *eb);
void ebb_size_release(struct ebb_balloon *eb);
int ebb_oom_register(struct ebb_balloon *eb);
void ebb_oom_unregister(struct ebb_balloon *eb);

/* hinting.c */
int ebb_hinting_init(struct ebb_balloon *eb);
void ebb_hinting_exit(struct ebb_balloon *eb);
void ebb_hinting_start(struct ebb_balloon *eb);
void ebb_hinting_changed(struct ebb_balloon *eb);
void ebb_hinting_returned(struct virtqueue *vq);
void ebb_hinting_release(struct ebb_balloon *eb);

/* report.c */
void ebb_report_returned(struct virtqueue *vq);

/* statistics.c */
void ebb_stats_init(struct ebb_balloon *eb);
int ebb_stats_start(struct ebb_balloon *eb);
void ebb_stats_requested(struct virtqueue *vq);

/* host_request.c */
int ebb_requests_init(struct ebb_balloon *eb);
void ebb_requests_exit(struct ebb_balloon *eb);
void ebb_requests_start(struct ebb_balloon *eb);
void ebb_requests_stop(struct ebb_balloon *eb);
void ebb_requests_returned(struct virtqueue *vq);
void ebb_requests_wake(struct ebb_balloon *eb);

/* report_early.c */
void ebb_early_start(struct ebb_balloon *eb);
void ebb_early_stop(void);
void ebb_early_show(struct seq_file *m);

/* reporting.c */
void ebb_reporting_wait(void);
bool ebb_reporting_runs(void);

/* report_now.c */
int ebb_report_now_init(struct ebb_balloon *eb);
void ebb_report_now_exit(struct ebb_balloon *eb);
void ebb_report_now_begin(struct ebb_balloon *eb, u64 id, unsigned int page_shift);
void ebb_report_now_early(struct ebb_balloon *eb, unsigned int page_shift);
void ebb_report_now_end_early(struct ebb_balloon *eb);
void ebb_report_now_cancel(struct ebb_balloon *eb);
bool ebb_report_now_ended(struct ebb_balloon *eb, u64 id, bool *complete);
void ebb_report_now_stop(struct ebb_balloon *eb);

#endif
