//! The guest's driver of the balloon: Linux's own, or the module `ebb_balloon` with its settings,
//! with or without the module `ebb_trackers`.

use ebb_agent::command_line::BalloonDriver;

/// The driver that a guest loads for the balloon device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// `virtio_balloon` of the guest's kernel.
    Stock,
    /// `ebb_balloon` (guest/linux/ebb_balloon), which serves the same device and its extension.
    Module(Module),
}

/// Settings of the module; its parameters on the guest's kernel command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// How free pages are found and reported to the host.
    pub tracker: Tracker,
    /// How pages of the balloon are named.
    pub encoding: Encoding,
    /// Size of the blocks that the balloon allocates.
    pub blocks: Blocks,
    /// Whether the trackers of `ebb_trackers` can be used.
    pub trackers: Trackers,
    /// Least delay of early reports in milliseconds, 0 for none; `None` for the module's default.
    pub report_delay_ms: Option<u32>,
}

/// Modules that the guest loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trackers {
    /// Only the driver, with the kernel's own page reporting.
    OfDriver,
    /// Also `ebb_trackers` (guest/linux/ebb_trackers).
    All,
}

impl Module {
    /// The module with everything at its default.
    pub const DEFAULT: Self = Self {
        tracker: Tracker::Reporting,
        encoding: Encoding::Auto,
        blocks: Blocks::Largest,
        trackers: Trackers::OfDriver,
        report_delay_ms: None,
    };
}

/// How the module finds the pages that it reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tracker {
    /// Not at all.
    Off,
    /// An array for each CPU of the pages freed on it, as in the page hinting patches v8 (2019).
    Percpu,
    /// A bitmap for each zone of the blocks that were freed, as in the page hinting patches v10
    /// (2019).
    Bitmap,
    /// The kernel's own page reporting, as in the patches v16.1 (2020).
    Reporting,
}

impl Tracker {
    /// The value of the module's parameter `tracker`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "none",
            Self::Percpu => "percpu",
            Self::Bitmap => "bitmap",
            Self::Reporting => "reporting",
        }
    }
}

/// How the module encodes the pages that it inflates and deflates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// The shortest negotiated encoding.
    Auto,
    /// A bitmap with a start.
    Bitmap,
    /// Ranges.
    Ranges,
}

impl Encoding {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bitmap => "bitmap",
            Self::Ranges => "ranges",
        }
    }
}

/// Size of the blocks that the module allocates for the balloon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// The largest free blocks first.
    Largest,
    /// Single pages of 4 KiB, as the stock driver.
    SinglePages,
}

impl Driver {
    /// The module with this tracker.
    pub const fn tracking(tracker: Tracker) -> Self {
        let trackers = match tracker {
            Tracker::Off | Tracker::Reporting => Trackers::OfDriver,
            Tracker::Percpu | Tracker::Bitmap => Trackers::All,
        };
        Self::Module(Module { tracker, trackers, ..Module::DEFAULT })
    }

    /// The module with this tracker, in guests that have all of them: to switch, or to differ by
    /// nothing else.
    pub const fn among_all(tracker: Tracker) -> Self {
        Self::Module(Module { tracker, trackers: Trackers::All, ..Module::DEFAULT })
    }

    /// The agent's value for it.
    pub fn in_guest(self) -> BalloonDriver {
        match self {
            Self::Stock => BalloonDriver::VirtioBalloon,
            Self::Module(_) => BalloonDriver::EbbBalloon,
        }
    }

    /// Arguments for the guest's kernel that choose the driver.
    pub(crate) fn kernel_arguments(self) -> Option<String> {
        let Self::Module(Module { tracker, encoding, blocks, trackers, report_delay_ms }) = self
        else {
            return None;
        };
        let encoding = match encoding {
            Encoding::Auto => String::new(),
            _ => format!(" ebb_balloon.encoding={}", encoding.name()),
        };
        let blocks = if blocks == Blocks::SinglePages { " ebb_balloon.max_order=0" } else { "" };
        let delay = report_delay_ms.map(|ms| format!(" ebb_balloon.report_delay_ms={ms}"));
        let trackers = if trackers == Trackers::All { " ebb.trackers" } else { "" };
        let (tracker, delay) = (tracker.name(), delay.unwrap_or_default());
        Some(format!(
            "ebb.balloon=ebb_balloon{trackers} ebb_balloon.tracker={tracker}{encoding}{blocks}\
             {delay}"
        ))
    }

    /// Description for a document.
    pub(crate) fn describe(self) -> Option<String> {
        let Self::Module(Module { tracker, encoding, blocks, report_delay_ms, .. }) = self else {
            return None;
        };
        let encoding = match encoding {
            Encoding::Auto => String::new(),
            _ => format!(", encoding {}", encoding.name()),
        };
        let blocks = if blocks == Blocks::SinglePages { ", single pages" } else { "" };
        let delay = match report_delay_ms {
            None => String::new(),
            Some(0) => ", no early reports".to_owned(),
            Some(ms) => format!(", early reports after {ms} ms"),
        };
        Some(format!("driver ebb_balloon, tracker {}{encoding}{blocks}{delay}", tracker.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_agent::command_line::CommandLine;

    #[test]
    fn the_stock_driver_needs_no_arguments() {
        assert_eq!((Driver::Stock.kernel_arguments(), Driver::Stock.describe()), (None, None));
    }

    #[test]
    fn each_setting_of_the_module_is_an_argument() {
        assert_eq!(
            Driver::Module(Module::DEFAULT).kernel_arguments().unwrap(),
            "ebb.balloon=ebb_balloon ebb_balloon.tracker=reporting"
        );
        let all = Module {
            tracker: Tracker::Percpu,
            encoding: Encoding::Bitmap,
            blocks: Blocks::SinglePages,
            trackers: Trackers::All,
            report_delay_ms: Some(0),
        };
        assert_eq!(
            Driver::Module(all).kernel_arguments().unwrap(),
            "ebb.balloon=ebb_balloon ebb.trackers ebb_balloon.tracker=percpu \
             ebb_balloon.encoding=bitmap ebb_balloon.max_order=0 \
             ebb_balloon.report_delay_ms=0"
        );
        let read = CommandLine::new("quiet ebb.balloon=ebb_balloon ebb_balloon.tracker=percpu");
        assert_eq!(read.balloon_driver(), Ok(Driver::Module(all).in_guest()));
        assert_eq!(
            Driver::Module(all).describe().unwrap(),
            "driver ebb_balloon, tracker percpu, encoding bitmap, single pages, no early reports"
        );
    }
}
