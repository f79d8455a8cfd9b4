//! Sending one round over several streams.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use ebb_abi::migration::RoundKind;
use ebb_abi::{PageRange, Pfn};

use crate::batch::Batch;
use crate::chunk::{by_region, span};
use crate::progress::PageCounters;
use crate::rate::RateLimiter;
use crate::{Cancel, Config, Holes, MigrationError, PageFeed, SourceMemory};

/// Interval of progress reports and checks during a round.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time that the other streams get after one has failed before they are shut down.
const FAILURE_GRACE: Duration = Duration::from_secs(2);

/// A data stream with its pending output.
pub(crate) struct Stream<'a> {
    writer: Box<dyn Write + Send + 'a>,
    batch: Batch,
    taken: Vec<PageRange>,
    held: Vec<PageRange>,
}

impl<'a> Stream<'a> {
    pub(crate) fn new(writer: Box<dyn Write + Send + 'a>) -> Self {
        Self { writer, batch: Batch::new(), taken: Vec::new(), held: Vec::new() }
    }
}

/// Parameters of a round.
pub(crate) struct Round<'a> {
    pub(crate) number: u32,
    pub(crate) kind: RoundKind,
    pub(crate) config: &'a Config,
    pub(crate) memory: &'a dyn SourceMemory,
    /// Regions of that memory.
    pub(crate) regions: &'a [PageRange],
    pub(crate) feed: &'a dyn PageFeed,
    pub(crate) limiter: &'a RateLimiter,
    pub(crate) cancel: &'a Cancel,
    /// Number of bytes sent so far, in all rounds.
    pub(crate) sent_bytes: &'a AtomicU64,
}

/// Result of a check during a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundControl {
    Continue,
    /// End the round with pages left.
    EndEarly,
}

impl Round<'_> {
    /// Sends the pages of the feed and calls `poll` periodically. Returns the pages by outcome.
    pub(crate) fn send(
        &self,
        streams: &mut [Stream<'_>],
        poll: &mut dyn FnMut() -> Result<RoundControl, MigrationError>,
    ) -> Result<PageCounters, MigrationError> {
        let stop = AtomicBool::new(false);
        let (sender, results) = channel();
        thread::scope(|scope| {
            let mut running = streams.len();
            for (index, stream) in streams.iter_mut().enumerate() {
                let (sender, stop): (Sender<_>, _) = (sender.clone(), &stop);
                scope.spawn(move || {
                    let result = self.send_on(index, stream, stop);
                    // The receiver is gone only if the scope's own thread is unwinding.
                    let _ = sender.send(result);
                });
            }
            drop(sender);
            let (mut pages, mut failure) = (PageCounters::default(), None);
            let mut cut_at = None;
            while running > 0 {
                match results.recv_timeout(POLL_INTERVAL) {
                    Ok(Ok(counters)) => {
                        running -= 1;
                        pages += counters;
                    }
                    Ok(Err(error)) => {
                        running -= 1;
                        failure.get_or_insert(error);
                    }
                    // A stream's thread has panicked; the end of the scope propagates that.
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if failure.is_none() {
                    match poll() {
                        Ok(RoundControl::Continue) => {}
                        Ok(RoundControl::EndEarly) => stop.store(true, Ordering::Relaxed),
                        Err(error) => failure = Some(error),
                    }
                }
                if failure.is_some() {
                    stop.store(true, Ordering::Relaxed);
                    let cut_at = *cut_at.get_or_insert_with(|| Instant::now() + FAILURE_GRACE);
                    if Instant::now() >= cut_at {
                        self.cancel.cancel();
                    }
                }
            }
            failure.map_or(Ok(pages), Err)
        })
    }

    fn send_on(
        &self,
        index: usize,
        stream: &mut Stream<'_>,
        stop: &AtomicBool,
    ) -> Result<PageCounters, MigrationError> {
        let mut taken = std::mem::take(&mut stream.taken);
        loop {
            if self.cancel.is_cancelled() {
                return Err(MigrationError::Cancelled);
            }
            if stop.load(Ordering::Relaxed) {
                break;
            }
            taken.clear();
            self.feed.take(self.config.chunk_pages, &mut taken)?;
            if taken.is_empty() {
                break;
            }
            for here in by_region(self.regions, &taken) {
                self.send_pages(index, stream, here)?;
            }
        }
        stream.taken = taken;
        stream.batch.end_round(self.number, self.kind);
        self.write(index, stream)?;
        stream.writer.flush().map_err(|source| MigrationError::Stream { stream: index, source })?;
        Ok(std::mem::take(&mut stream.batch.pages))
    }

    /// Sends pages of one region. The host is queried once for the whole span: nearly all of the
    /// pages written in a chunk are populated.
    fn send_pages(
        &self,
        index: usize,
        stream: &mut Stream<'_>,
        pages: &[PageRange],
    ) -> Result<(), MigrationError> {
        let mut held = std::mem::take(&mut stream.held);
        held.clear();
        let range = span(pages);
        match self.config.holes {
            Holes::Read => held.push(range),
            Holes::Skip => self.memory.held(range, &mut held).map_err(|source| {
                MigrationError::Memory { action: "query the populated pages of", range, source }
            })?,
        }
        for range in pages {
            let first = held.partition_point(|part| part.end() <= range.start);
            let parts = held[first..].iter().map(|part| part.intersection(*range));
            let mut next = range.start;
            for part in parts.take_while(|part| !part.is_empty()) {
                if part.start > next {
                    stream.batch.discard(PageRange::new(next, part.start.0 - next.0));
                }
                self.send_held(index, stream, part)?;
                next = part.end();
            }
            if next < range.end() {
                stream.batch.discard(PageRange::new(next, range.end().0 - next.0));
            }
        }
        stream.held = held;
        Ok(())
    }

    fn send_held(
        &self,
        index: usize,
        stream: &mut Stream<'_>,
        range: PageRange,
    ) -> Result<(), MigrationError> {
        let mut next = range.start.0;
        while next < range.end().0 {
            if stream.batch.is_full() {
                self.write(index, stream)?;
            }
            let pages = (range.end().0 - next).min(stream.batch.room_pages());
            let piece = PageRange::new(Pfn(next), pages);
            stream.batch.read(self.memory, piece, self.config.zero_pages).map_err(|source| {
                MigrationError::Memory { action: "read", range: piece, source }
            })?;
            next += pages;
        }
        Ok(())
    }

    fn write(&self, index: usize, stream: &mut Stream<'_>) -> Result<(), MigrationError> {
        let bytes = stream.batch.size_bytes();
        self.limiter.wait(bytes, &|| self.cancel.is_cancelled());
        stream.batch.write(&mut *stream.writer).map_err(|source| {
            if self.cancel.is_cancelled() {
                MigrationError::Cancelled
            } else {
                MigrationError::Stream { stream: index, source }
            }
        })?;
        self.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }
}
