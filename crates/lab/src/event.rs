//! What a running experiment tells: the same events whether it runs here or in the virtual host.
//!
//! In the virtual host they cross the border as JSON, one a line on standard output (`--json-events`).

use std::sync::mpsc::Sender;

use serde::{Deserialize, Serialize};

use crate::results::{Host, Sample, Series};

/// One thing that happened in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The host is ready; sent once, first.
    Host(Host),
    /// A series begins.
    SeriesBegins {
        /// Its name.
        series: String,
        /// How many guests it may come to.
        guests: u32,
    },
    /// Something that takes time begins.
    Step {
        /// The guest it is about; 0 for the host.
        guest: u32,
        /// What, in a few words.
        text: String,
    },
    /// The state of the host.
    Sample(Sample),
    /// A series is over.
    SeriesEnds(Series),
}

/// Where an experiment tells its events; a receiver that has gone away is no error, the run ends by other means.
#[derive(Debug, Clone)]
pub struct Events(Sender<Event>);

impl Events {
    /// Events that go to this sender's receiver.
    pub fn new(sender: Sender<Event>) -> Self {
        Self(sender)
    }

    /// Tells an event.
    pub fn tell(&self, event: Event) {
        let _ = self.0.send(event);
    }

    /// Tells that something begins which takes time.
    pub fn step(&self, guest: u32, text: impl Into<String>) {
        self.tell(Event::Step { guest, text: text.into() });
    }
}

/// Gathers the events of a run into the parts of its document.
#[derive(Debug, Default)]
pub struct Collector {
    /// The host, once it is known.
    pub host: Option<Host>,
    /// The series that are over.
    pub series: Vec<Series>,
    /// All samples.
    pub samples: Vec<Sample>,
}

impl Collector {
    /// Takes what belongs into the document.
    pub fn take(&mut self, event: Event) {
        match event {
            Event::Host(host) => self.host = Some(host),
            Event::SeriesEnds(series) => self.series.push(series),
            Event::Sample(sample) => self.samples.push(sample),
            Event::SeriesBegins { .. } | Event::Step { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    /// The events that a run with these results tells.
    fn events() -> Vec<Event> {
        let results = example();
        let mut events = vec![
            Event::Host(results.host.clone()),
            Event::SeriesBegins { series: "reporting".to_owned(), guests: 8 },
            Event::Step { guest: 1, text: "starts".to_owned() },
        ];
        events.extend(results.samples.into_iter().map(Event::Sample));
        events.extend(results.series.into_iter().map(Event::SeriesEnds));
        events
    }

    #[test]
    fn events_survive_the_way_as_lines() {
        for event in events() {
            let line = serde_json::to_string(&event).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
        }
    }

    #[test]
    fn the_collector_keeps_what_belongs_into_the_document() {
        let mut collector = Collector::default();
        for event in events() {
            collector.take(event);
        }
        let results = example();
        assert_eq!(collector.host, Some(results.host));
        assert_eq!(collector.series, results.series);
        assert_eq!(collector.samples, results.samples);
    }
}
