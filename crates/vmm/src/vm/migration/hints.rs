//! The guest's balloon driver as a source of free pages.

use ebb_abi::balloon::{Feature, Features};
use ebb_abi::{Order, PageRange};
use ebb_balloon::{HintEnd, HintSink};
use ebb_migration::{BoxError, FreePageSource, HintReceiver};

use crate::api::migration::FreePageChoice;
use crate::vm::{SharedTransport, lock};

/// How the driver is asked for free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Free page hinting (virtio 1.3 section 5.5.6.5).
    Hints,
    /// Host requests of the extension (docs/extension.md, "Host requests").
    Query,
}

/// The driver cannot be asked by any of the allowed methods.
#[derive(Debug, thiserror::Error)]
enum Unasked {
    #[error("no driver in the guest has negotiated {0}")]
    NotNegotiated(&'static str),
    #[error(
        "the guest relies on the content of its free pages (page poison, or pages zeroed by the device)"
    )]
    Poisoned,
    #[error(
        "it is unknown whether the guest relies on the content of its free pages, since the \
         device does not offer page poison; start the machine with --balloon poison=on"
    )]
    PoisonUnknown,
    #[error("{0}")]
    Refused(String),
}

/// Asks the driver with the configured method.
pub(super) struct FreePages {
    transport: SharedTransport,
    choice: FreePageChoice,
    /// The request in progress, with its number.
    asked: Option<(Way, u64)>,
    /// The method used last, for the report.
    used: FreePageChoice,
}

impl FreePages {
    /// Uses the method `choice`, which is not [`FreePageChoice::Off`].
    pub(super) fn new(transport: SharedTransport, choice: FreePageChoice) -> Self {
        Self { transport, choice, asked: None, used: FreePageChoice::Off }
    }

    /// The method used last; off if the driver could not be asked.
    pub(super) fn used(&self) -> FreePageChoice {
        self.used
    }

    fn way(&self) -> Result<Way, Unasked> {
        let transport = lock(&self.transport);
        let balloon = transport.device().balloon();
        let negotiated = balloon.negotiated();
        let asked = Features(balloon.info().offered_features).contains(Feature::PagePoison);
        drop(transport);
        if !asked {
            return Err(Unasked::PoisonUnknown);
        }
        // The destination would show zeros in place of the guest's poison pattern, or old content
        // in place of zeros, the guest's own or those that the device has answered for.
        if negotiated.relies_on_free_pages() {
            return Err(Unasked::Poisoned);
        }
        let (hints, query) = (Feature::FreePageHint, Feature::HostRequest);
        match self.choice {
            FreePageChoice::Query | FreePageChoice::Auto if negotiated.contains(query) => {
                Ok(Way::Query)
            }
            FreePageChoice::Hints | FreePageChoice::Auto if negotiated.contains(hints) => {
                Ok(Way::Hints)
            }
            FreePageChoice::Query => Err(Unasked::NotNegotiated("host requests")),
            FreePageChoice::Hints | FreePageChoice::Auto => {
                Err(Unasked::NotNegotiated("free page hinting"))
            }
            FreePageChoice::Off => Err(Unasked::NotNegotiated("anything")),
        }
    }

    /// Withdraws a request whose answer is no longer needed.
    fn withdraw(&mut self) {
        if let Some((Way::Query, request_id)) = self.asked {
            let mut transport = lock(&self.transport);
            if transport.device_mut().cancel_request(request_id) {
                transport.interrupt_used();
            }
        }
    }
}

impl FreePageSource for FreePages {
    fn start(&mut self, hints: HintReceiver) -> Result<(), BoxError> {
        let way = self.way()?;
        let sink = Box::new(Sink(hints));
        let mut transport = lock(&self.transport);
        match way {
            Way::Hints => {
                let started = transport.device_mut().balloon_mut().start_hinting(sink);
                started.map_err(|error| Unasked::Refused(error.to_string()))?;
                transport.config_changed();
                self.asked = Some((Way::Hints, 0));
                self.used = FreePageChoice::Hints;
            }
            Way::Query => {
                let asked = transport.device_mut().request_free_pages(Order(0), sink);
                let (request_id, interrupt) =
                    asked.map_err(|error| Unasked::Refused(error.to_string()))?;
                if interrupt {
                    transport.interrupt_used();
                }
                self.asked = Some((Way::Query, request_id));
                self.used = FreePageChoice::Query;
            }
        }
        Ok(())
    }

    fn stop(&mut self) {
        match self.asked {
            Some((Way::Hints, _)) => {
                let mut transport = lock(&self.transport);
                if transport.device_mut().balloon_mut().stop_hinting() {
                    transport.config_changed();
                }
            }
            Some((Way::Query, _)) => self.withdraw(),
            None => {}
        }
    }

    fn finish(&mut self) {
        match self.asked {
            Some((Way::Hints, _)) => {
                let mut transport = lock(&self.transport);
                if transport.device_mut().balloon_mut().finish_hinting() {
                    transport.config_changed();
                }
            }
            Some((Way::Query, _)) => self.withdraw(),
            None => {}
        }
        self.asked = None;
    }
}

/// Passes the device's hints on to the engine.
struct Sink(HintReceiver);

impl HintSink for Sink {
    fn hint(&mut self, ranges: &[PageRange]) {
        self.0.hint(ranges);
    }

    fn ended(&mut self, _end: HintEnd) {
        self.0.ended();
    }
}
