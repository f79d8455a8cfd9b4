// SPDX-License-Identifier: GPL-2.0-only
/*
 * Free page hinting (virtio 1.3 section 5.5.6.5): on a command of the host the
 * guest's largest free blocks are allocated, hinted, and kept until the host
 * writes DONE. When memory is short they are freed earlier: a hint is no
 * promise for later.
 */
#include "ebb_balloon.h"

#define HINT_ORDER	EBB_LARGEST_ORDER
#define HINT_PAGES	BIT(HINT_ORDER)
/* Longest run of the work item before it yields to others. */
#define TURN_MS		50

static struct ebb_balloon *ebb_device_of(struct ebb_hinting *h)
{
	return container_of(h, struct ebb_balloon, hinting);
}

/* Frees up to @count blocks. Returns their number. */
static unsigned long ebb_release_blocks(struct ebb_hinting *h, unsigned long count)
{
	unsigned long released = 0;
	struct page *page;

	while (released < count) {
		spin_lock_irq(&h->lock);
		page = list_first_entry_or_null(&h->blocks, struct page, lru);
		if (page) {
			list_del(&page->lru);
			h->nr_blocks--;
		}
		spin_unlock_irq(&h->lock);
		if (!page)
			break;
		ebb_whole_give(ebb_device_of(h), page, HINT_ORDER);
		released++;
	}
	return released;
}

static u32 ebb_read_command(struct ebb_hinting *h)
{
	struct ebb_balloon *eb = ebb_device_of(h);

	if (atomic_xchg(&h->changed, 0))
		virtio_cread_le(eb->vdev, struct virtio_balloon_config, free_page_hint_cmd_id,
				&h->command);
	return h->command;
}

/* The lock must be held. */
static void ebb_take_returned(struct ebb_hinting *h)
{
	struct virtqueue *vq = ebb_device_of(h)->vqs[EBB_VQ_FREE_PAGE];
	unsigned int len;
	void *token;

	while ((token = virtqueue_get_buf(vq, &len))) {
		if (token == &h->begin)
			h->begin_sent = false;
		else if (token == &h->end)
			h->end_sent = false;
	}
}

/* Sends a command id. Returns false if there is no room yet, or the last one is still in flight. */
static bool ebb_send_number(struct ebb_hinting *h, __virtio32 *buffer, bool *sent, u32 number)
{
	struct ebb_balloon *eb = ebb_device_of(h);
	struct virtqueue *vq = eb->vqs[EBB_VQ_FREE_PAGE];
	struct scatterlist sg;
	bool done = false;

	spin_lock_irq(&h->lock);
	ebb_take_returned(h);
	if (!*sent) {
		*buffer = cpu_to_virtio32(eb->vdev, number);
		sg_init_one(&sg, buffer, sizeof(*buffer));
		done = !virtqueue_add_outbuf(vq, &sg, 1, buffer, GFP_ATOMIC);
		*sent = done;
		virtqueue_kick(vq);
	}
	spin_unlock_irq(&h->lock);
	return done;
}

/* Returns 0, -EAGAIN if there is no room yet, or -ENOMEM if no free block is left. */
static int ebb_send_block(struct ebb_hinting *h)
{
	struct ebb_balloon *eb = ebb_device_of(h);
	struct virtqueue *vq = eb->vqs[EBB_VQ_FREE_PAGE];
	struct scatterlist sg;
	struct page *page;
	int err = -EAGAIN;

	spin_lock_irq(&h->lock);
	ebb_take_returned(h);
	if (vq->num_free > 1)
		err = 0;
	else
		virtqueue_kick(vq);
	spin_unlock_irq(&h->lock);
	if (err)
		return err;

	page = ebb_whole_take(eb, HINT_ORDER);
	if (!page)
		return -ENOMEM;
	sg_init_table(&sg, 1);
	sg_set_page(&sg, page, PAGE_SIZE << HINT_ORDER, 0);

	spin_lock_irq(&h->lock);
	err = virtqueue_add_inbuf(vq, &sg, 1, page, GFP_ATOMIC);
	if (!err) {
		list_add(&page->lru, &h->blocks);
		h->nr_blocks++;
		virtqueue_kick(vq);
	}
	spin_unlock_irq(&h->lock);
	if (err) {
		ebb_whole_give(eb, page, HINT_ORDER);
		return -EAGAIN;
	}
	ebb_count(eb, EBB_HINTED_BLOCKS, 1);
	return 0;
}

/* Performs one step. Returns false when the next step has to wait for the device. */
static bool ebb_hint(struct ebb_hinting *h)
{
	u32 command = ebb_read_command(h);

	switch (h->phase) {
	case EBB_HINTING_IDLE:
		if (command == VIRTIO_BALLOON_CMD_ID_DONE)
			ebb_release_blocks(h, ULONG_MAX);
		if (command == VIRTIO_BALLOON_CMD_ID_DONE ||
		    command == VIRTIO_BALLOON_CMD_ID_STOP || command == h->answered)
			return false;
		h->phase = EBB_HINTING_BEGIN;
		return true;
	case EBB_HINTING_BEGIN:
		if (!ebb_send_number(h, &h->begin, &h->begin_sent, command))
			return false;
		h->answered = command;
		h->phase = EBB_HINTING_BLOCKS;
		return true;
	case EBB_HINTING_BLOCKS:
		if (command == h->answered) {
			int err = ebb_send_block(h);

			if (err != -ENOMEM)
				return !err;
		}
		h->phase = EBB_HINTING_END;
		return true;
	case EBB_HINTING_END:
		if (!ebb_send_number(h, &h->end, &h->end_sent, VIRTIO_BALLOON_CMD_ID_STOP))
			return false;
		h->phase = EBB_HINTING_IDLE;
		return true;
	}
	return false;
}

static void ebb_hinting_work(struct work_struct *work)
{
	struct ebb_hinting *h = container_of(work, struct ebb_hinting, work);
	struct ebb_balloon *eb = ebb_device_of(h);
	unsigned long end = jiffies + msecs_to_jiffies(TURN_MS);

	while (!READ_ONCE(eb->stopping) && ebb_hint(h)) {
		if (time_after(jiffies, end)) {
			queue_work(eb->wq, work);
			break;
		}
		cond_resched();
	}
	if (virtqueue_is_broken(eb->vqs[EBB_VQ_FREE_PAGE]))
		ebb_device_failed(eb);
}

static void ebb_queue_hinting(struct ebb_balloon *eb)
{
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	if (!eb->stopping)
		queue_work(eb->wq, &eb->hinting.work);
	spin_unlock_irqrestore(&eb->lock, flags);
}

/**
 * ebb_hinting_returned() - callback of free_page_vq
 * @vq: the queue
 */
void ebb_hinting_returned(struct virtqueue *vq)
{
	struct ebb_balloon *eb = vq->vdev->priv;

	/* The work item waits only for a full queue or for a command id in flight. */
	ebb_queue_hinting(eb);
}

/**
 * ebb_hinting_changed() - the configuration may have another command
 * @eb: the device
 */
void ebb_hinting_changed(struct ebb_balloon *eb)
{
	struct ebb_hinting *h = &eb->hinting;

	if (!eb->vqs[EBB_VQ_FREE_PAGE])
		return;
	atomic_set(&h->changed, 1);
	ebb_queue_hinting(eb);
}

static struct ebb_hinting *ebb_hinting_of(struct shrinker *shrinker)
{
#ifdef EBB_ALLOCATED_SHRINKER
	return shrinker->private_data;
#else
	return container_of(shrinker, struct ebb_hinting, shrinker);
#endif
}

static unsigned long ebb_shrink_count(struct shrinker *shrinker, struct shrink_control *control)
{
	return READ_ONCE(ebb_hinting_of(shrinker)->nr_blocks) * HINT_PAGES;
}

static unsigned long ebb_shrink_scan(struct shrinker *shrinker, struct shrink_control *control)
{
	unsigned long blocks = DIV_ROUND_UP(control->nr_to_scan, HINT_PAGES);

	return ebb_release_blocks(ebb_hinting_of(shrinker), blocks) * HINT_PAGES;
}

static int ebb_register_hinting_shrinker(struct ebb_hinting *h)
{
#ifdef EBB_ALLOCATED_SHRINKER
	h->shrinker = shrinker_alloc(0, "ebb_balloon");
	if (!h->shrinker)
		return -ENOMEM;
	h->shrinker->count_objects = ebb_shrink_count;
	h->shrinker->scan_objects = ebb_shrink_scan;
	h->shrinker->private_data = h;
	shrinker_register(h->shrinker);
	return 0;
#else
	h->shrinker.count_objects = ebb_shrink_count;
	h->shrinker.scan_objects = ebb_shrink_scan;
	h->shrinker.seeks = DEFAULT_SEEKS;
	return register_shrinker(&h->shrinker, "ebb_balloon");
#endif
}

static void ebb_unregister_hinting_shrinker(struct ebb_hinting *h)
{
#ifdef EBB_ALLOCATED_SHRINKER
	shrinker_free(h->shrinker);
#else
	unregister_shrinker(&h->shrinker);
#endif
}

/**
 * ebb_hinting_init() - prepare hinting, if it was negotiated
 * @eb: the device
 *
 * Return: 0, or the error of the shrinker's registration.
 */
int ebb_hinting_init(struct ebb_balloon *eb)
{
	struct ebb_hinting *h = &eb->hinting;
	int err = 0;

	spin_lock_init(&h->lock);
	INIT_LIST_HEAD(&h->blocks);
	INIT_WORK(&h->work, ebb_hinting_work);
	if (ebb_offers(eb, VIRTIO_BALLOON_F_FREE_PAGE_HINT)) {
		err = ebb_register_hinting_shrinker(h);
		h->registered = !err;
	}
	return err;
}

void ebb_hinting_exit(struct ebb_balloon *eb)
{
	if (eb->hinting.registered)
		ebb_unregister_hinting_shrinker(&eb->hinting);
}

/**
 * ebb_hinting_start() - reset the state of hinting
 * @eb: a device with new queues
 */
void ebb_hinting_start(struct ebb_balloon *eb)
{
	struct ebb_hinting *h = &eb->hinting;

	h->phase = EBB_HINTING_IDLE;
	h->command = VIRTIO_BALLOON_CMD_ID_STOP;
	h->answered = VIRTIO_BALLOON_CMD_ID_STOP;
	h->begin_sent = false;
	h->end_sent = false;
}

/**
 * ebb_hinting_release() - free all hinted blocks
 * @eb: a device that was reset, whose work item no longer runs
 */
void ebb_hinting_release(struct ebb_balloon *eb)
{
	if (eb->vqs[EBB_VQ_FREE_PAGE]) {
		while (virtqueue_detach_unused_buf(eb->vqs[EBB_VQ_FREE_PAGE]))
			;
	}
	ebb_release_blocks(&eb->hinting, ULONG_MAX);
}
