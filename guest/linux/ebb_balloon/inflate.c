// SPDX-License-Identifier: GPL-2.0-only
/*
 * The balloon's size.
 *
 * One work item moves the balloon towards its target. It never waits: it sends
 * as many messages as are idle, and runs again when one is returned. So a slow
 * host costs no time, and one that never answers blocks nothing.
 *
 * When no memory can be allocated, the out-of-memory notifier deflates blocks
 * by itself, with a preallocated message.
 */
#include <linux/delay.h>
#include <linux/list_sort.h>
#include <linux/oom.h>

#include "ebb_balloon.h"

/* Longest run of the work item before it yields to others. */
#define TURN_MS			50
/* Longest time spent allocating blocks for the next messages. */
#define GATHER_MS		200
/* Time until the next attempt when no memory was available. */
#define SHORTAGE_MS		200
/* Time until the next attempt when compaction has isolated the last pages. */
#define ISOLATED_MS		20
/* Units that are deflated on out of memory, like the stock driver. */
#define OOM_UNITS		256
/* Called before notifiers of priority 0, like the stock driver's. */
#define OOM_PRIORITY		80
/* How long the out-of-memory notifier waits for the host's acknowledgement. */
#define OOM_WAIT_MS		1000

enum step { STEP_ON, STEP_WAIT, STEP_SHORTAGE, STEP_ISOLATED };

/* Completes a returned message: inflated blocks enter the balloon, deflated ones are freed. */
static bool ebb_finish(struct ebb_balloon *eb, struct ebb_message *message)
{
	u64 units = message->set.units;
	ktime_t start;

	if (message->use == EBB_USE_MOVE) {
		if (!ebb_move_end(eb, message))
			return false;
	} else if (message->command == VIRTIO_BALLOON_CMD_INFLATE) {
		ebb_blocks_keep(eb, &message->pages, false);
		spin_lock_irq(&eb->lock);
		eb->inflating -= units;
		eb->units += units;
		spin_unlock_irq(&eb->lock);
		ebb_count(eb, EBB_INFLATED_PAGES, units >> EBB_UNIT_SHIFT);
	} else {
		start = ktime_get();
		ebb_blocks_free(eb, &message->pages);
		ebb_count(eb, EBB_RELEASE_NS, ktime_to_ns(ktime_sub(ktime_get(), start)));
		spin_lock_irq(&eb->lock);
		eb->deflating -= units;
		spin_unlock_irq(&eb->lock);
		ebb_count(eb, EBB_DEFLATED_PAGES, units >> EBB_UNIT_SHIFT);
	}
	ebb_message_put(eb, message);
	return true;
}

/* Returns whether all returned messages could be completed. */
static bool ebb_finish_all(struct ebb_balloon *eb)
{
	struct ebb_message *message;
	LIST_HEAD(later);
	bool all;

	for (;;) {
		spin_lock_irq(&eb->lock);
		message = list_first_entry_or_null(&eb->done, struct ebb_message, node);
		if (message)
			list_del_init(&message->node);
		spin_unlock_irq(&eb->lock);
		if (!message)
			break;
		if (!ebb_finish(eb, message))
			list_add_tail(&message->node, &later);
	}
	all = list_empty(&later);
	spin_lock_irq(&eb->lock);
	list_splice(&later, &eb->done);
	spin_unlock_irq(&eb->lock);
	return all;
}

/*
 * Allocates blocks for the next messages and sorts them: neighbours form one
 * range, and a bitmap need not span all of memory for a few pages.
 */
static void ebb_gather(struct ebb_balloon *eb, u64 units, const struct ebb_format *format)
{
	unsigned long end = jiffies + msecs_to_jiffies(GATHER_MS);
	ktime_t start = ktime_get();
	u64 most = EBB_MESSAGE_UNITS;

	/* The page numbers of larger blocks would not fit. */
	if (format->encodings == BIT(VIRTIO_BALLOON_ENC_PFNS))
		most = EBB_BARE_PFNS;
	units = min_t(u64, units, EBB_MESSAGE_UNITS);
	while (units && time_before(jiffies, end) && !READ_ONCE(eb->stopping)) {
		unsigned int order;
		struct page *page = ebb_block_allocate(eb, min(units, most), &order);

		if (!page)
			break;
		set_page_private(page, order);
		list_add(&page->lru, &eb->pending);
		units -= 1ULL << order << EBB_UNIT_SHIFT;
		cond_resched();
	}
	list_sort(NULL, &eb->pending, ebb_by_address);
	ebb_count(eb, EBB_ALLOCATE_NS, ktime_to_ns(ktime_sub(ktime_get(), start)));
}

static enum step ebb_inflate(struct ebb_balloon *eb, u64 units)
{
	struct ebb_message *message = ebb_message_get(eb, EBB_USE_BULK);
	struct page *page, *next;
	struct ebb_format format;
	bool fresh;

	if (!message)
		return STEP_WAIT;
	format = ebb_message_format(eb, message);
	fresh = list_empty(&eb->pending);
	if (fresh)
		ebb_gather(eb, units, &format);
	if (list_empty(&eb->pending)) {
		ebb_message_put(eb, message);
		return STEP_SHORTAGE;
	}

	list_for_each_entry_safe(page, next, &eb->pending, lru) {
		u64 size = 1ULL << page_private(page) << EBB_UNIT_SHIFT;

		if (message->set.units + size > units ||
		    !ebb_set_add(&message->set, &format,
				 (u64)page_to_pfn(page) << EBB_UNIT_SHIFT, size))
			break;
		list_move_tail(&page->lru, &message->pages);
	}
	if (!message->set.units) {
		/* Gathered for another target or encoding, or beyond the range of page numbers. */
		ebb_blocks_free(eb, &eb->pending);
		ebb_message_put(eb, message);
		return fresh ? STEP_SHORTAGE : STEP_ON;
	}
	if (ebb_message_send(eb, message, VIRTIO_BALLOON_CMD_INFLATE)) {
		/* Nothing was sent: the blocks belong to the guest. */
		ebb_blocks_free(eb, &message->pages);
		ebb_message_put(eb, message);
		return STEP_WAIT;
	}
	return STEP_ON;
}

/* The message was not sent: its blocks stay in the balloon. */
static void ebb_keep_again(struct ebb_balloon *eb, struct ebb_message *message)
{
	ebb_blocks_keep(eb, &message->pages, true);
	spin_lock_irq(&eb->lock);
	eb->units += message->set.units;
	spin_unlock_irq(&eb->lock);
	ebb_message_put(eb, message);
}

static enum step ebb_deflate(struct ebb_balloon *eb, u64 units)
{
	struct ebb_message *message = ebb_message_get(eb, EBB_USE_BULK);

	if (!message)
		return STEP_WAIT;
	ebb_blocks_take(eb, message, min_t(u64, units, EBB_MESSAGE_UNITS));
	if (!message->set.units) {
		ebb_message_put(eb, message);
		return STEP_ISOLATED;
	}
	if (ebb_message_send(eb, message, VIRTIO_BALLOON_CMD_DEFLATE)) {
		ebb_keep_again(eb, message);
		return STEP_WAIT;
	}
	return STEP_ON;
}

static void ebb_write_actual(struct ebb_balloon *eb)
{
	u32 actual;

	mutex_lock(&eb->actual_mutex);
	spin_lock_irq(&eb->lock);
	actual = eb->units + eb->deflating;
	spin_unlock_irq(&eb->lock);
	if (actual != eb->actual && !READ_ONCE(eb->stopping)) {
		virtio_cwrite_le(eb->vdev, struct virtio_balloon_config, actual, &actual);
		eb->actual = actual;
	}
	mutex_unlock(&eb->actual_mutex);
}

static void ebb_read_target(struct ebb_balloon *eb)
{
	u32 target;

	if (!atomic_xchg(&eb->config_changed, 0))
		return;
	virtio_cread_le(eb->vdev, struct virtio_balloon_config, num_pages, &target);
	WRITE_ONCE(eb->yielding, false);
	if (target != eb->target) {
		eb->shortage_told = false;
		eb->order = ebb_largest_order();
	}
	/* A part of a page cannot be inflated. */
	eb->target = round_down(target, 1U << EBB_UNIT_SHIFT);
}

static enum step ebb_step(struct ebb_balloon *eb, bool *idle)
{
	s64 distance;

	spin_lock_irq(&eb->lock);
	distance = eb->target - eb->units - eb->inflating;
	*idle = !eb->inflating && !eb->deflating;
	spin_unlock_irq(&eb->lock);

	/*
	 * After an out-of-memory deflation, do not inflate again before the
	 * host writes the target.
	 */
	if (distance > 0 && !READ_ONCE(eb->yielding))
		return ebb_inflate(eb, distance);
	ebb_blocks_free(eb, &eb->pending);
	return distance < 0 ? ebb_deflate(eb, -distance) : STEP_WAIT;
}

static void ebb_again(struct ebb_balloon *eb, unsigned int delay_ms)
{
	spin_lock_irq(&eb->lock);
	if (!eb->stopping)
		queue_delayed_work(eb->wq, &eb->size_work, msecs_to_jiffies(delay_ms));
	spin_unlock_irq(&eb->lock);
}

static void ebb_size_work(struct work_struct *work)
{
	struct ebb_balloon *eb = container_of(to_delayed_work(work), struct ebb_balloon, size_work);
	unsigned long end = jiffies + msecs_to_jiffies(TURN_MS);
	enum step next;
	bool idle;

	if (eb->waiting_since) {
		ebb_count(eb, EBB_SEND_NS, ktime_to_ns(ktime_sub(ktime_get(), eb->waiting_since)));
		eb->waiting_since = 0;
	}
	do {
		if (READ_ONCE(eb->stopping))
			return;
		if (!ebb_finish_all(eb))
			ebb_again(eb, 1);
		ebb_read_target(eb);
		next = ebb_step(eb, &idle);
	} while (next == STEP_ON && time_before(jiffies, end));

	ebb_write_actual(eb);
	switch (next) {
	case STEP_ON:
		ebb_again(eb, 0);
		break;
	case STEP_WAIT:
		/* Nothing to do, or all messages are in flight. */
		if (!idle)
			eb->waiting_since = ktime_get();
		break;
	case STEP_SHORTAGE:
		if (!eb->shortage_told)
			dev_info(&eb->vdev->dev, "no memory for the balloon at the moment, %llu KiB short\n",
				 (eb->target - eb->units - eb->inflating) << 2);
		eb->shortage_told = true;
		eb->order = ebb_largest_order();
		ebb_again(eb, SHORTAGE_MS);
		break;
	case STEP_ISOLATED:
		/* Messages in flight restart this when they are returned. */
		if (idle)
			ebb_again(eb, ISOLATED_MS);
		break;
	}
}

/**
 * ebb_size_kick() - schedule a check of the balloon's size
 * @eb: the device
 *
 * Can be called from interrupts.
 */
void ebb_size_kick(struct ebb_balloon *eb)
{
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	if (!eb->stopping)
		mod_delayed_work(eb->wq, &eb->size_work, 0);
	spin_unlock_irqrestore(&eb->lock, flags);
}

void ebb_size_init(struct ebb_balloon *eb)
{
	INIT_DELAYED_WORK(&eb->size_work, ebb_size_work);
	mutex_init(&eb->actual_mutex);
	INIT_LIST_HEAD(&eb->blocks);
	INIT_LIST_HEAD(&eb->spare);
	INIT_LIST_HEAD(&eb->pending);
}

/**
 * ebb_size_start() - initialize an empty balloon
 * @eb: a device with queues
 *
 * Return: 0, or an error if the queues cannot be used.
 */
int ebb_size_start(struct ebb_balloon *eb)
{
	eb->units = 0;
	eb->inflating = 0;
	eb->deflating = 0;
	eb->actual = 0;
	eb->target = 0;
	eb->waiting_since = 0;
	eb->yielding = false;
	atomic_set(&eb->config_changed, 1);
	return ebb_messages_start(eb);
}

/**
 * ebb_size_release() - free all memory of the balloon
 * @eb: a device that was reset, whose work item no longer runs
 */
void ebb_size_release(struct ebb_balloon *eb)
{
	ebb_messages_take_back(eb);
	/* Compaction holds its pages only briefly. */
	while (!ebb_finish_all(eb))
		usleep_range(1000, 2000);
	ebb_blocks_free(eb, &eb->pending);
	ebb_blocks_free_all(eb);
}

/* Removes the out-of-memory message from the returned ones, if it is there. */
static bool ebb_catch_oom_message(struct ebb_balloon *eb)
{
	bool caught;

	spin_lock_irq(&eb->lock);
	caught = eb->oom.state == EBB_DONE && !list_empty(&eb->oom.node);
	if (caught)
		list_del_init(&eb->oom.node);
	spin_unlock_irq(&eb->lock);
	return caught;
}

static bool ebb_oom_message_is_back(struct ebb_balloon *eb)
{
	wait_event_idle_timeout(eb->acked, READ_ONCE(eb->oom.state) != EBB_SENT ||
				READ_ONCE(eb->broken), msecs_to_jiffies(OOM_WAIT_MS));
	if (ebb_catch_oom_message(eb))
		ebb_finish(eb, &eb->oom);
	/* The work item may have caught it first, and is freeing its pages. */
	wait_event_idle_timeout(eb->acked, READ_ONCE(eb->oom.state) != EBB_DONE ||
				READ_ONCE(eb->broken), msecs_to_jiffies(OOM_WAIT_MS));
	return READ_ONCE(eb->oom.state) == EBB_IDLE;
}

static int ebb_oom_notify(struct notifier_block *notifier, unsigned long unused, void *data)
{
	struct ebb_balloon *eb = container_of(notifier, struct ebb_balloon, oom_notifier);
	unsigned long *freed = data;
	struct ebb_message *message;
	unsigned long pages;

	if (READ_ONCE(eb->stopping) || (eb->oom.state != EBB_IDLE && !ebb_oom_message_is_back(eb)))
		return NOTIFY_OK;
	message = ebb_message_get(eb, EBB_USE_OOM);
	if (!message)
		return NOTIFY_OK;
	WRITE_ONCE(eb->yielding, true);
	ebb_blocks_take(eb, message, OOM_UNITS);
	pages = message->set.units >> EBB_UNIT_SHIFT;
	if (!pages) {
		ebb_message_put(eb, message);
		return NOTIFY_OK;
	}
	if (ebb_message_send(eb, message, VIRTIO_BALLOON_CMD_DEFLATE)) {
		ebb_keep_again(eb, message);
		return NOTIFY_OK;
	}
	/*
	 * Waits for the acknowledgement even if it is not required: nearly
	 * every host gives it at once. A host that does not must not block a
	 * guest that is out of memory; the pages are freed when the message is
	 * returned.
	 */
	if (ebb_oom_message_is_back(eb)) {
		*freed += pages;
		ebb_count(eb, EBB_OOM_PAGES, pages);
	}
	ebb_write_actual(eb);
	return NOTIFY_OK;
}

int ebb_oom_register(struct ebb_balloon *eb)
{
	eb->oom_notifier.notifier_call = ebb_oom_notify;
	eb->oom_notifier.priority = OOM_PRIORITY;
	return eb->deflate_on_oom ? register_oom_notifier(&eb->oom_notifier) : 0;
}

void ebb_oom_unregister(struct ebb_balloon *eb)
{
	if (eb->deflate_on_oom)
		unregister_oom_notifier(&eb->oom_notifier);
}
